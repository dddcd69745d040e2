"""
Chores that backends of several stores share, each written once.

    waiters               a caller that waits for a lock, and the table of a backend's waiters
    polling_line          how the waiters of one client share the polling of a store that wakes none
    losses                how a holder hears that its grant has ended behind its back, and why
    error_translation     from a driver's errors to those of the contract
    background_task       the tasks behind the calls, and several attempts of which one is enough
    node_line             who holds and who waits in a store of nodes: etcd, ZooKeeper
    rules                 who holds, whose turn it is, who is woken, what a token is: on the rows of one name
    row_table             rows that are dictionaries in this process
    row_backend           the whole contract, over a store of rows

`fencing_sdk._values.loop_owner` knows which loop and process own something, and `fencing_sdk._values.tasks`
ends tasks that no other task awaits: the engine and the HTTP pool need them too.
"""
