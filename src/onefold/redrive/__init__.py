"""Look at dead letters, and send them back to where they came from: what `onefold redrive` does.

Each broker is a module of `brokers`, with the interface `letters.DeadLetters`. A letter is removed only once the broker
has confirmed that it is back, so that a redrive that is killed in between sends it twice: the guard of its consumer
absorbs the second one.
"""
