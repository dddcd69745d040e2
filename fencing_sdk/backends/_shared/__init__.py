"""
Chores that backends of several stores share, each written once.

    bells                 the bells of one backend object, and the messages that ring them
    tokens                growth of tokens, and the age of a hybrid one
    error_translation     from a driver's errors to those of the contract
    background_task       the tasks behind the calls, and several attempts of which one is enough
    request_queue         the one connection of a database for the requests of all tasks

The rules of a line are `fencing_sdk.abc.line`. `fencing_sdk._values.loop_owner` knows which loop and process own
something, and `fencing_sdk._values.tasks` ends tasks that no other task awaits: the engine and the HTTP pool need them
too.
"""
