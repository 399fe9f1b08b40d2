"""Budgets over time windows, shared by many processes.

In: the question of a model call whether it may be sent, and its usage afterwards.
Out: admission, a wait or a refusal, and what is left.
May touch: the memory of the process, or a server with `redis`, from threads that only this room
starts.

A model call, from its reservation to its settled count:

1. `engine` is the gate of model calls, and opens a reservation. `needs` computes the amount that
   the call needs of each quota, from the tokens that `estimates` expects. An amount belongs to one
   count: that of a key (`keys`) in a window (`windows`).
2. `engine` reserves these amounts, or lets the call wait in the queues of `wait_queues`.
3. `client` sends the operation and waits for the reply, within a timeout, and renews a reservation
   until its call ends. `store_worker` is the thread that sends operations in batches.
4. The store applies the operation. `store` is the protocol, and `stores` the table of all stores:
   `memory` counts in this process. `redis_store` counts on a server by the scripts of
   `redis_scripts`. `redis_server`, `redis_cluster` and `redis_sentinel` find the server by a URL.
5. When the call has ended, its event carries its usage to `engine`, which settles the reservation.
6. If a worker dies, its lease expires. The store then releases the reservation at the next
   reservation or read of that count (`expire` in `scripts/common.lua` and in `memory`), and
   `recovery` charges it if a ledger has its usage.

If the store is unavailable, `engine` decides by `fallback`, and `store_worker` keeps settlements
until it recovers. Lost counts are restored from the counts that each process saw (`known_counts`),
and by `recovery` from a ledger. `kill_listener` receives kills and releases from other
processes.

`section` reads the quotas of a policy file into `quota`. `refusals` writes the reasons of refused
calls. `remaining` answers queries. `setup` connects all of them.

Limits of conversations use the same stores: `conversation_sync` has the sums that processes share,
adds to them, and reads them before a call.
"""
