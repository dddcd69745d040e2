"""
What backends of several stores share, each chore written once.

    waiters               a caller that waits for a lock, and the table of a backend's waiters
    wakeup                the event that wakes it
    polling_line          how the waiters of one client share the polling of a store that wakes none
    loss_notices          telling clients of grants that ended behind their holder's back
    revocation_watcher    noticing that an operator took a grant away, by messages that are asked for
    revocation_reasons    telling a holder why an operator took its grant away
    option_values         options of a URL or of `connect`: switches, seconds, the kind of tokens
    error_translation     from a driver's errors to those of the contract
    background_task       the tasks behind the calls
    unanswered_requests   claims with a request whose outcome is unknown
    lock_table            the reference semantics, as a table in memory
    share_table           permits, readers and writers, on top of it

Which loop and process own something is told by `fencing_sdk._values.loop_owner`, and `fencing_sdk._values.unawaited`
ends tasks that no other task awaits: the engine and the HTTP pool need them too.
"""
