"""The messages that a worker has taken and not settled: which of them run, which wait, and that all are in progress."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Final

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from onefold import Current, UsageError, current
from onefold.queues._nats import messages
from onefold.queues._nats.consumer import BEAT_SECONDS_MIN, BEATS, Delivery, Rules, Settings, Step, is_last, log
from onefold.queues._shared.consumer import ENDS_THE_LOOP, AsyncConsuming
from onefold.queues._shared.verdict import ACK, SOON, of_interrupt
from onefold.stores.base import Address

# How long the settings of a consumer are believed, once one of its messages has to come again.
SETTINGS_SECONDS: Final = 60.0

# A connection that is gone, or a server that is silent, leaves a message unsettled: the server delivers it again.
GONE: Final = (nats.errors.Error, OSError)

# How long messages are handled without a turn for others.
YIELD_SECONDS: Final = 0.01

# How many messages may wait in a worker's hands, each for something of its own, before it fetches no more.
WAITING_MAX: Final = 1_000

# Of how many consumers the settings are remembered; ephemeral ones come and go.
KNOWN_MAX: Final = 1_000


class Job:
    """A message that this worker has not settled yet."""

    __slots__ = ("address", "claim", "delivery", "known", "message", "since", "step", "timer", "turn")

    def __init__(self, message: Msg, delivery: Delivery, known: Known, since: float, turn: Turn | None) -> None:
        self.message = message
        self.delivery = delivery
        self.known = known
        self.since = since
        self.turn = turn
        self.step = Step("again")
        # The address of its record, once something has to be reported about it.
        self.address: Address | None = None
        # Its claim, while its handler runs.
        self.claim: Current | None = None
        # Set while it waits in place.
        self.timer: asyncio.TimerHandle | None = None

    @property
    def is_kept(self) -> bool:
        """Return whether the server should not deliver it to another worker: not if its claim may be another's."""
        return self.claim is None or not self.claim.lost

    def started(self) -> None:
        """Note the claim, inside the handler's delivery."""
        self.claim = current()

    def end_turn(self) -> None:
        if self.turn is not None and not self.turn.done():
            self.turn.set_result(None)


# Done when a message has had its turn: it is settled, or waits in place.
Turn = asyncio.Future[None]


class Known:
    """The settings of one consumer, until when they are believed, and by which connection they were read."""

    __slots__ = ("believed_for", "client", "is_guess", "one_at_a_time", "settings", "until")

    def __init__(self, settings: Settings, client: Client, *, is_guess: bool) -> None:
        self.settings = settings
        self.client = client
        self.is_guess = is_guess
        # A guess is doubted when it first matters; then less often, for the sake of a user without the permission.
        self.believed_for = 0.0 if is_guess else SETTINGS_SECONDS
        self.until = 0.0
        self.one_at_a_time = asyncio.Lock()

    def believe(self, now: float) -> None:
        """Believe the settings for a while: a guess twice as long each time."""
        if not self.is_guess:
            self.believed_for = SETTINGS_SECONDS
        self.until = now + self.believed_for
        self.believed_for = min(max(2 * self.believed_for, SOON), SETTINGS_SECONDS)


class Jobs:
    """The unsettled messages of one callback. At most `concurrency` of them run; the others wait for their turn."""

    def __init__(
        self, consuming: AsyncConsuming, rules: Rules, concurrency: int, *, runs_without_key: bool = False
    ) -> None:
        self._consuming = consuming
        self._rules = rules
        self._concurrency = concurrency
        self._runs_without_key = runs_without_key
        self._unsettled: dict[Job, None] = {}
        self._queue: deque[Job] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._running = 0
        # How many wait in place for something of their own.
        self._aside = 0
        # By stream and consumer.
        self._known: dict[tuple[str, str], Known] = {}
        self._beat: asyncio.TimerHandle | None = None
        self._beat_seconds = 0.0
        self._signals: asyncio.Task[None] | None = None
        self._asking: asyncio.Task[None] | None = None
        # Set while there are few enough messages to fetch more.
        self._room = asyncio.Event()
        self._few = 0
        self.is_leaving = False

    def __len__(self) -> int:
        return len(self._unsettled)

    @property
    def busy(self) -> int:
        """Return how many messages take up room: not those that wait for something of their own."""
        return len(self._unsettled) - (self._aside if self._aside < WAITING_MAX else 0)

    async def take(self, message: Msg, *, turn: Turn | None = None, warns: bool = True) -> None:
        """Handle a message as soon as there is a place for it, and keep it in progress meanwhile."""
        if message.subject == self._rules.dead_letter:
            raise UsageError(
                f"dead_letter={message.subject!r} is a subject that this consumer reads: its dead letters would come "
                "back again and again. Filter it out, or name another one"
            )
        origin = messages.origin_of(message.reply)
        delivery = messages.delivery_of(message, origin)
        known = self._known.get(origin[:2]) or await self._read(message, origin[:2])
        known.client = messages.client_of(message)
        messages.take(message)
        now = asyncio.get_running_loop().time()
        job = Job(message, delivery, known, now, turn)
        if self.is_leaving and not is_last(delivery, known.settings):
            if warns:
                self._rules.came_too_late(delivery)
            job.end_turn()
            with suppress(*GONE):
                await messages.give_back(message, SOON)
            return
        self._unsettled[job] = None
        self._queue.append(job)
        self._start()
        if self._beat is None:
            self._beat = asyncio.get_running_loop().call_later(self._beat_seconds, self._on_beat)

    async def has_room(self, batch: int) -> None:
        """Wait until at most half as many messages take up room, so that few fetches get many."""
        few = batch // 2
        # Of several subscriptions, each waits for its own number.
        self._few = max(self._few, few)
        while self.busy > few and not self.is_leaving:
            self._room.clear()
            await self._room.wait()

    async def leave(self, within: float) -> bool:
        """Give back what was not started, and settle the rest. Return False if something still runs after `within`."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + within
        self.stop()
        waiting = [job for job in self._unsettled if job.timer is not None]
        unstarted = [job for job in self._queue if not is_last(job.delivery, job.known.settings)]
        # Nobody would deliver the others again: they run.
        self._queue = deque(job for job in self._queue if is_last(job.delivery, job.known.settings))
        for job in unstarted:
            job.step = Step("give back")
        for job in waiting:
            self._stop_waiting(job)
            job.step = self._left(job, job.step)
        for job in (*unstarted, *waiting):
            self._spawn(self._run(job))
        # Those that run may have lost their places, if a task was cancelled.
        self._go_on()
        while self._tasks and (left := deadline - clock()) > 0:
            await asyncio.wait(self._tasks, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        for client in {known.client for known in self._known.values()}:
            with suppress(*GONE):
                await client.flush(messages.FLUSH_SECONDS_MAX)
        return not self._tasks

    def stop(self) -> None:
        """Take no more messages."""
        self.is_leaving = True
        self._room.set()

    def _start(self) -> None:
        """Have a free place work, if there is one. Its task takes messages while there are any.

        With a task for each, every acknowledgement would be a write of its own to the socket.
        """
        if self._running < self._concurrency:
            self._running += 1
            self._spawn(self._work())

    async def _work(self) -> None:
        clock = asyncio.get_running_loop().time
        since = clock()
        try:
            while self._queue:
                await self._run(self._queue.popleft())
                if clock() - since >= YIELD_SECONDS:
                    # Handlers that never wait must not keep signs of progress, heartbeats and acknowledgements back.
                    await asyncio.sleep(0)
                    since = clock()
        finally:
            self._running -= 1
            if self.is_leaving:
                self._go_on()
            elif self._queue:
                # Cancelled: if the loop does not end, the others must not wait for a message that may never come.
                asyncio.get_running_loop().call_later(SOON, self._go_on)

    def _go_on(self) -> None:
        if self._queue:
            self._start()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, job: Job) -> None:
        try:
            await self._settle(job)
        except GONE as error:
            self._forget(job)
            where = self._rules.found_at(job.delivery, self._address_of(job))
            log.info("%s: %s, the server delivers it again", where, type(error).__name__)
        except asyncio.CancelledError:
            # Mostly the loop ends, and no timer fires. Otherwise somebody has cancelled this task, such as its handler.
            if job in self._unsettled:
                job.claim = None
                self._cancelled(job, Step("again", SOON, "its task was cancelled"))
            raise
        except BaseException:
            # The loop ends. The claim is kept until its lease ends, and the message comes again.
            self._forget(job)
            raise

    def _cancelled(self, job: Job, step: Step) -> None:
        if self.is_leaving:
            # Nothing starts after `drain`, which waits for this task.
            job.step = self._left(job, step)
            self._spawn(self._run(job))
        else:
            self._wait(job, step)

    async def _settle(self, job: Job) -> None:
        message, step = job.message, job.step
        while True:
            match step.action:
                case "again" if not step.delay:
                    step = await self._handled(job)
                case "again":
                    if not self.is_leaving:
                        return self._wait(job, step)
                    step = self._left(job, step)
                case "ack":
                    self._forget(job)
                    return await (messages.ack_surely if self._has_no_key(job) else messages.ack)(message)
                case "give back":
                    self._forget(job)
                    return await messages.give_back(message, step.delay)
                case "bury" if not step.delay:
                    refused = await self._refused(job, step.reason)
                    if refused is None:
                        self._forget(job)
                        return await messages.terminate(message, step.reason)
                    step = refused
                case "bury":
                    if not self.is_leaving:
                        return self._wait(job, step)
                    self._rules.given_up(job.delivery, job.known.settings, job.address)
                    step = Step("give back")

    async def _handled(self, job: Job) -> Step:
        delivery = job.delivery
        try:
            # Of a held message, each delivery counts.
            verdict = await self._consuming.deliver(
                delivery.message, delivery, held_before=delivery.num_delivered - 1, on_start=job.started
            )
        except ENDS_THE_LOOP:
            raise
        except BaseException as error:  # noqa: BLE001 - a task has nobody to tell; its claim is kept until it ends
            verdict = of_interrupt(error)
        job.claim = None
        if verdict == ACK:
            return self._rules.after(verdict, delivery, job.known.settings, 0.0)
        await self._refresh(job.known, job.message)
        return self._rules.after(verdict, delivery, job.known.settings, _age(job), self._address_of(job))

    async def _refused(self, job: Job, reason: str) -> Step | None:
        """Send a dead letter. Return what to do if no stream takes it."""
        address = self._address_of(job)
        room = messages.client_of(job.message).max_payload
        try:
            await messages.bury(job.message, self._rules.dead(job.delivery, reason, room, address))
        except Exception as error:  # noqa: BLE001 - whatever it is, the consumer survives, and the message is kept
            where = self._rules.found_at(job.delivery, address)
            return self._rules.refused(error, reason, job.delivery, job.known.settings, _age(job), where)
        self._rules.buried(reason, address)
        return None

    def _wait(self, job: Job, step: Step) -> None:
        job.step = step._replace(delay=0.0)
        job.timer = asyncio.get_running_loop().call_later(step.delay, self._again, job)
        self._aside += step.is_aside
        job.end_turn()
        self._look_for_room()

    def _again(self, job: Job) -> None:
        self._stop_waiting(job)
        self._queue.append(job)
        self._start()

    def _left(self, job: Job, step: Step) -> Step:
        where = self._rules.found_at(job.delivery, job.address)
        return self._rules.left(step, job.delivery, job.known.settings, where)

    def _stop_waiting(self, job: Job) -> None:
        if job.timer is not None:
            job.timer.cancel()
            job.timer = None
            self._aside -= job.step.is_aside

    def _forget(self, job: Job) -> None:
        """Send no more signs of progress: after a nak they would delay its next delivery."""
        self._unsettled.pop(job, None)
        job.end_turn()
        self._look_for_room()

    def _look_for_room(self) -> None:
        if self.busy <= self._few:
            self._room.set()

    def _has_no_key(self, job: Job) -> bool:
        """Return whether nothing but its acknowledgement keeps the message from running again."""
        return self._runs_without_key and not self._consuming.address_of(job.delivery.message).key

    def _address_of(self, job: Job) -> Address:
        if job.address is None:
            job.address = self._consuming.address_of(job.delivery.message)
        return job.address

    def _on_beat(self) -> None:
        self._beat = None
        if self._unsettled:
            self._beat = asyncio.get_running_loop().call_later(self._beat_seconds, self._on_beat)
            if self._signals is None or self._signals.done():
                self._signals = asyncio.create_task(self._signal())
            guessed = next((job for job in self._unsettled if job.known.is_guess), None)
            if guessed is not None and (self._asking is None or self._asking.done()):
                self._asking = asyncio.create_task(self._refresh(guessed.known, guessed.message))

    async def _signal(self) -> None:
        """Tell the server that each message is in progress, if its claim is not lost."""
        for job in [*self._unsettled]:
            if job in self._unsettled and job.is_kept and messages.client_of(job.message).is_connected:
                with suppress(*GONE):
                    await job.message.in_progress()

    async def _refresh(self, known: Known, message: Msg) -> None:
        """Read the settings again if that was long ago: `max_deliver` may have been changed meanwhile."""
        clock = asyncio.get_running_loop().time
        # Whoever comes meanwhile waits for the answer: by a wrong guess a message may be given back for the last time.
        async with known.one_at_a_time:
            if clock() < known.until:
                return
            with suppress(UsageError, *GONE):
                known.settings = await messages.settings_of(message)
                known.is_guess = False
                self._set_beat()
            known.believe(clock())

    async def _read(self, message: Msg, consumer: tuple[str, str]) -> Known:
        is_guess = False
        try:
            settings = await messages.settings_of(message)
        except GONE as error:
            settings, is_guess = Settings(), True
            log.warning(
                "the settings of the consumer %s of the stream %s cannot be read (%s): ack_wait=%.3g s and no "
                "max_deliver are assumed until they can",
                *(consumer[1], consumer[0], type(error).__name__, settings.ack_wait),
            )
        if len(self._known) >= KNOWN_MAX:
            self._known.clear()
        known = self._known[consumer] = Known(settings, messages.client_of(message), is_guess=is_guess)
        known.believe(asyncio.get_running_loop().time())
        self._set_beat()
        return known

    def _set_beat(self) -> None:
        shortest = min(known.settings.ack_wait for known in self._known.values())
        self._beat_seconds = max(shortest / BEATS, BEAT_SECONDS_MIN)
        loop = asyncio.get_running_loop()
        if self._beat is not None and self._beat.when() > loop.time() + self._beat_seconds:
            # That of a consumer with a longer one would be too late.
            self._beat.cancel()
            self._beat = loop.call_later(self._beat_seconds, self._on_beat)


def _age(job: Job) -> float:
    return asyncio.get_running_loop().time() - job.since
