"""The lint judges keys and exceptions by their names: tables of what is found, and of what only looks like it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest

from onefold.lint.ambiguous_errors import is_doubt
from onefold.lint.unstable_keys import changes, is_of_a_try


def table(text: str) -> list[str]:
    return text.split()


CHANGING = table(
    """
    argument:attempt argument:delivery_attempt field:deliveryAttempt header:x-delivery-attempt header:x-retry
    header:X-Retry-Count argument:retry_attempt field:retryAttempt argument:n_attempts argument:num_retries
    argument:attempts_made header:x-death header:x-death.count field:redelivery_count argument:current_time
    argument:sent_at header:x-amz-receive-count field:ApproximateReceiveCount argument:message_age
    header:Kafka-Offset header:x-acquired-count header:celery-retries field:meta.attempts header:x-attempt
    argument:ATTEMPT argument:retryCount argument:retries argument:failed_count header:date
    header:x-job-run-attempt argument:try_number argument:receive_count argument:redelivered
    argument:delivery_tag field:x-death.0.count field:retrycount header:x-retrycount argument:tries
    header:b3 field:ts argument:timestamp argument:time argument:now
    argument:received_at field:receivedAt field:sentTimestamp field:SentTimestamp
    field:ApproximateFirstReceiveTimestamp argument:receipt_handle field:ackId argument:lock_token
    header:x-delivery-count field:attributes.ApproximateReceiveCount argument:is_retry
    header:CloudTasks-TaskRetryCount header:X-CloudTasks-TaskRetryCount header:X-CloudTasks-TaskExecutionCount
    header:googclient_deliveryattempt field:delivery_attempts argument:deliveryattempt
    header:x-opt-delivery-count field:dequeueCount argument:tries_so_far argument:retry_no
    field:numberOfAttempts field:published_at header:x-published-at header:redis_message_id
    argument:num_delivered argument:stream_sequence field:consumerSequence header:Nats-Sequence
    argument:stream_entry_id header:redis-entry-id argument:times_delivered
    header:X-Taskiq-requeue field:_retries header:taskiq_retries
    header:requeue_timestamp field:dramatiq_retries field:rq.retries header:requeued_at
    field:task_token field:temporal.taskToken
    """
)

# Made by a gateway, a tracer or a model, for a try of the operation.
OF_A_TRY = table(
    """
    header:x-request-id header:X-Request-ID header:request-id header:x-amzn-requestid header:x-amzn-trace-id
    header:traceparent header:tracestate header:x-trace-id header:x-b3-traceid header:b3 header:uber-trace-id
    header:x-cloud-trace-context header:sentry-trace header:cf-ray header:x-correlation-id
    header:correlation-id field:correlation_id argument:correlationId field:meta.correlation_id
    argument:trace_id field:traceId field:spanId argument:tool_call_id field:tool_use_id argument:toolCallId
    field:message.tool_call_id header:x-tool-call-id argument:traceparent field:function_call_id
    """
)

# Names of the business, and what happened once.
STAYING = table(
    """
    field:id field:order_id field:delivery_number field:delivery_no field:deliveryNumber field:retry_of
    header:x-event-id field:entry argument:payment_try_id field:death field:time_slot_id field:receive_number
    field:entry_id field:try field:trade_no field:delivery.no field:event.time header:ce-id
    argument:attempt_id argument:retry_policy_id field:time_entry_id field:nonce header:offset field:delivery
    argument:payment_id header:idempotency-key field:created_at field:event_time field:occurred_at
    argument:uuid4 argument:run_id field:payment_attempt_id field:date field:delivery_date field:country
    field:registry field:delivery_id field:job_id argument:task_id field:number field:invoice_number
    field:retry_key field:agent field:age_group field:message_id header:x-message-key field:index
    field:requeue_id field:requeue_policy
    field:payment_attempt.id field:delivery_note_number field:retry-token field:page field:count field:no
    field:received_order_number field:failed_payment_id field:item_count
    field:request_id argument:request_id field:requestId field:trace_number field:tool_id field:call_id
    header:Nats-Msg-Id field:sequence field:sequence_number field:num_ordered
    header:x-request-key field:correlation_group field:traced_order_id argument:function_id header:x-order-trace-id
    """
)


@pytest.mark.parametrize("key", CHANGING)
def test_a_key_is_found_that_another_delivery_has_not(key: str) -> None:
    assert changes(key)


@pytest.mark.parametrize("key", OF_A_TRY)
def test_an_id_of_a_try_is_found(key: str) -> None:
    assert is_of_a_try(key)


@pytest.mark.parametrize("key", STAYING)
def test_a_key_of_the_business_is_not(key: str) -> None:
    assert not changes(key)
    assert not is_of_a_try(key)


IN_DOUBT = table(
    """
    builtins:Exception builtins:BaseException builtins:OSError builtins:TimeoutError socket:timeout
    socket:error socket:gaierror http.client:RemoteDisconnected http.client:HTTPException httpx:HTTPError
    httpx:TransportError httpx:ReadError httpx:NetworkError httpx:RequestError httpx:RemoteProtocolError
    httpx:ReadTimeout requests:RequestException requests.exceptions:RequestException
    requests.exceptions:ConnectionError urllib3.exceptions:ProtocolError urllib3.exceptions:HTTPError
    aiohttp:ClientError aiohttp:ServerDisconnectedError aiohttp:ClientOSError asyncio:CancelledError
    asyncio:IncompleteReadError psycopg:OperationalError sqlalchemy.exc:OperationalError
    sqlalchemy.exc:DBAPIError botocore.exceptions:BotoCoreError grpc:RpcError stripe:APIConnectionError
    stripe.error:APIConnectionError redis:RedisError builtins:RuntimeError builtins:EOFError
    concurrent.futures:TimeoutError ssl:SSLError billiard.exceptions:WorkerLostError
    celery.exceptions:SoftTimeLimitExceeded google.api_core.exceptions:ServiceUnavailable
    google.api_core.exceptions:GatewayTimeout google.api_core.exceptions:GoogleAPICallError
    google.api_core.exceptions:Unknown grpc.aio:AioRpcError concurrent.futures.process:BrokenProcessPool
    shop:GatewayTimeout adyen:AdyenError stripe:APIError openai:InternalServerError onefold:OnefoldError
    sqlite3:OperationalError anyio:EndOfStream anyio:BrokenResourceError anyio:ClosedResourceError
    trio:BrokenResourceError websockets:ConnectionClosed json:JSONDecodeError
    urllib.error:URLError smtplib:SMTPException ssl:SSLZeroReturnError builtins:BrokenPipeError
    """
)

# What the other side has said for good, and words that mean something else there.
FINAL = table(
    """
    stripe:CardError stripe:InvalidRequestError stripe:IdempotencyError shop:POSError shop:CardDeclined
    shop:InsufficientFundsError shop:AccountClosedError shop:OrderCancelled shop:PaymentCanceled
    shop:ProductUnavailable shop:UnknownCard shop:InvalidPayloadError openai:BadRequestError
    shop:CardReadError shop:GatewayRejected builtins:ValueError builtins:KeyError psycopg:IntegrityError
    psycopg.errors:UniqueViolation square:ClientError shop:SalesChannelError shop:CardNetworkDeclined
    shop:ValidationError shop:LimitReached shop:PaymentAborted shop:AccountUnknown shop:DuplicateDatabaseError
    shop:Response
    """
)


@pytest.mark.parametrize("name", IN_DOUBT)
def test_an_exception_is_in_doubt_wherever_its_library_is(name: str) -> None:
    assert is_doubt(name)


@pytest.mark.parametrize("name", FINAL)
def test_an_answer_for_good_is_not(name: str) -> None:
    assert not is_doubt(name)


# The classes below which a library has its lost connections and time-outs.
ROOTS = {
    "aiohttp": ("ClientConnectionError", "ClientResponseError", "ClientPayloadError"),
    "botocore.exceptions": ("HTTPClientError", "ConnectionError"),
    "httpx": ("TransportError", "DecodingError", "HTTPStatusError"),
    "pika.exceptions": ("AMQPConnectionError", "ChannelClosed"),
    "psycopg": ("OperationalError", "InterfaceError", "InternalError"),
    "redis.exceptions": ("ConnectionError", "TimeoutError"),
    "requests.exceptions": ("ConnectionError", "Timeout", "HTTPError", "ChunkedEncodingError"),
    "sqlalchemy.exc": ("OperationalError", "InterfaceError", "TimeoutError", "DisconnectionError"),
    "urllib3.exceptions": ("PoolError", "ProtocolError", "TimeoutError", "SSLError"),
}
# Below them, and yet certain: nothing was sent, or the server has said no.
CERTAIN = {
    *("UnsupportedProtocol", "InvalidProxyURL", "ServerFingerprintMismatch"),
    *("AuthenticationError", "AuthenticationWrongNumberOfArgsError", "AuthorizationError", "ExternalAuthProviderError"),
    *("ProbableAuthenticationError", "ProbableAccessDeniedError", "ProtocolSyntaxError", "ProtocolVersionMismatch"),
    *("HostChangedError", "NoFreeChannels", "ResponseNotChunked"),
}


def below_the_roots() -> Iterator[str]:
    for module, roots in ROOTS.items():
        library = importlib.import_module(module)
        lost = tuple(getattr(library, root) for root in roots)
        for name, kind in vars(library).items():
            if isinstance(kind, type) and issubclass(kind, lost) and name not in CERTAIN:
                yield f"{module}:{name}"


def test_the_names_find_what_the_classes_say() -> None:
    """The lint imports no library; here they are, so that their own trees are asked."""
    assert [name for name in below_the_roots() if not is_doubt(name)] == []
