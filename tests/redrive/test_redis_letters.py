"""Redis Streams: fields that are not text, and servers that refuse."""

from __future__ import annotations

import secrets

import pytest

from tests.redrive.tools import Streams


class TestRedis:
    def test_fields_that_are_not_text_go_back_as_they_came(self, redis_place: Streams) -> None:
        own = {b"\xff": b"\x00\xff", b"\xfe": b"2", b"body": b"\x00" * 100_000}
        fields = {**own, b"x-onefold-stream": redis_place.origin}
        redis_place.client.xadd(redis_place.dead, fields)

        assert redis_place.redrive("--send").exit_code == 0

        ((_, found),) = redis_place.client.xrange(redis_place.origin)
        assert found == own

    @pytest.mark.parametrize("forbidden", ["xdel", "xrange", "type"])
    def test_a_user_that_may_not_do_it_is_one_line(self, redis_place: Streams, forbidden: str) -> None:
        user, password = f"u{secrets.token_hex(4)}", secrets.token_hex(8)
        redis_place.client.execute_command("ACL", "SETUSER", user, "on", f">{password}", "~*", "+@all", f"-{forbidden}")
        redis_place.bury("one", b"one")
        straight = redis_place.broker
        redis_place.broker = straight.replace("redis://", f"redis://{user}:{password}@")
        try:
            said = redis_place.redrive("--send")
        finally:
            redis_place.broker = straight
            redis_place.client.execute_command("ACL", "DELUSER", user)

        assert (said.exit_code, said.stdout) == (1, "")
        assert said.stderr.startswith("onefold: Redis refuses it: ")
        assert said.stderr.count("\n") == 1
        assert password not in said.output
        assert redis_place.listed() == 1

    def test_an_option_that_the_client_does_not_know_is_one_line(self, redis_place: Streams) -> None:
        redis_place.broker += f"{'&' if '?' in redis_place.broker else '?'}colour=red"

        said = redis_place.redrive()

        assert (said.exit_code, said.stdout) == (1, "")
        assert said.stderr == "onefold: the broker's URL has an option that the client does not know\n"
