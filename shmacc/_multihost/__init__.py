"""One group over many hosts: the protocol, without an engine.

The modules here are state machines. They do no I/O, start no threads and read no clocks: the
driver passes messages and the time to them, and does what they ask for. `shmacc.ray` drives them
with actors, the tests with a transport that drops, doubles and delays messages. (segment.py is the
exception: it does a forwarder's actions on a real group.)

The parts
    host       Has a segment, an ordinary group. Its workers know nothing of all this.
    forwarder  One for each host (forwarder.py): makes the segment follow the owner.
    owner      One (owner.py, rounds.py): has the step, counts, decides. It never sees a row.
    shards     One or more (shard.py), on hosts that live: keep the rows that hosts have shipped
               (pieces.py).
    chief      Any process that calls `round` or `take`; several wait in the queue at the owner.

A round
    1. Hosts report how many gradients their segments have. A chief asks for `required` of them.
    2. The counts reach the number: the owner makes a grant. It says where the shards are, on hosts
       that report. Every forwarder opens a round of its own segment, which seals it (also if it is
       empty), ships the sums to the shards, and then reports its batch: the count, the
       contributors, and which shards have a piece of it.
    3. All living hosts have reported their batches: the owner fixes these as the members of the
       round, and the chief has the shards add up exactly these. The block begins. (If enough
       gradients are there, the owner waits no longer than `grace` for hosts that have not even
       sealed; a grant ends in any case after `expiry`.)
    4. The block ends: the owner moves the step on by one. Every forwarder consumes its segment's
       round, which moves the segment's step on and wakes its workers. Or the block raises: every
       forwarder gives its segment's round up. The gradients stay where they are, and so they are
       in the next round, with those that have come since.

Why nothing is lost, doubled or stale

    Invariant 1. The segment is the truth. What is shipped is a copy: the segment keeps the
    gradients until the owner has moved the step on. So the death of a shard or of a forwarder, a
    chief's exception, and messages that are lost cost time and no gradient.

    Invariant 2. A fence is the number of times that gradients were consumed or dropped. A host
    reports the fence that its segment's content belongs to, and the owner counts it only if that is
    its own fence. Only the owner moves the fence on, at the moment that the members of a round are
    consumed; a forwarder takes the new fence over in the same commit that empties the segment. So
    no gradient is a member of two rounds. Nor does a gradient of an older step get into a later
    one, since the segment drops it. The step alone cannot do this, for `set_global_step` may set a
    step that was there before.

    Invariant 3. A batch belongs to one grant, a grant to one fence, and no two grants of any owners
    have the same number. For every grant, every host ships what it has, under a new name (host,
    incarnation, grant), and the chief asks for pieces by these names. So all pieces of a member are
    where its grant said, and none is of another grant's content. A shard that was only out of reach
    and comes back is asked for nothing.

    Invariant 4. Messages in both directions carry whole states, not events: a report has all that
    the owner must know of a host, its answer all that the host must follow. Each has a number, and
    a message with a lower number than the last is thrown away. So a message that is lost, doubled
    or late is repaired by the next one, and a host cannot miss a grant that was made while it
    learnt of a step.

What dies, and what that costs
    worker     As with one host: its last gradient is in the segment wholly or not at all.
    forwarder  The round that it had open in the segment takes applies again, and keeps its
               gradients. The next incarnation seals it, ships and reports again; a lower
               incarnation is refused. Between its enrolment and its first report nobody knows what
               the segment has: until its lease ends, a grant waits for that report, and a failed
               grant is made again although the others have too few. If its batch was a member
               already, gradients that came in between are dropped with the step, although their
               applies returned True.
    host       After `lease` without a report its gradients do not count, until it reports again. A
               grant goes on without it, if it has no shard. What is in an open block stays there.
    shard      Dies with its host. A grant with a shard on a lost host ends at once. A chief
               that finds pieces missing says so. In both cases the owner makes another grant in
               the same moment: hosts stay sealed, and ship to shards on hosts that live.
    chief      The queue forgets it after `chief_lease`. In the block: nothing is consumed. Unlike
               on one host, a chief that was only stopped for that long has lost its round, too: the
               end of its block raises.
    owner      The next one does not know the step, and refuses rounds until `set_global_step`.
               Only the chief can know whether the last round was consumed. Segments whose step is
               the one that was set keep their gradients, the others start empty. The owner's `term`
               is part of all its numbers, so what its predecessor said is thrown away. A chief in
               its block only says that it is alive (`hear`), and asks for nothing: so the next
               owner gives it no round whose gradients it has not seen. The term is the time, and
               the clock of another node may be behind: hosts report the latest term that they know,
               and the owner goes on in a later one.

Void steps
    A void step moves on by one without a round: its gradients are dropped, and workers, which
    follow the step, compute theirs again. What the chief waits for is the next step. Reasons:

    A contributor at two hosts. Within a host the segment sees to it that a contributor is in a
    round once. If a worker is restarted on another host after its first gradient was accepted, both
    segments have accepted one, and a sum cannot be taken apart again. In the next step a worker
    that has moved is at one host only. If the contributor is at two hosts again, processes on both
    live and apply as the same one: that is the chief's error, at every other such step, until one
    of them is ended.
      The owner compares the batches' contributors when it is about to fix a round's members, so
    before anybody has seen the round. Cost: eight bytes for each contributor and round; one step
    for each worker that is restarted elsewhere in the step of its first apply. Rejected: refusing
    one host's batch alone, since its other workers would wait for a step that does not come;
    keeping contributors' gradients apart, which would ship all of them instead of their sums.

    Too few after all. Hosts have sealed for a grant, and refused gradients, and then others were
    lost, so that too few are left. Workers whose gradients were refused wait for the next step. On
    one host they do so too, but there the round that they were too late for always comes. To find
    out whether any was refused, every host would have to keep books of every grant; a step is
    cheaper.

    Nothing comes, in a doubtful case. In some cases nobody knows whether workers wait for the next
    step in the same way: after the death of an owner, after a step that was set while hosts were
    sealed or that emptied a segment at its own step, and if a host is lost after a round was given
    up. So if a chief waits then, has too few, and nothing has come for `chief_lease`, the step is
    void; once. A block that raises is no such case: its gradients are all there, and enough.

The end
    `finish` ends the run for good: the owner makes no grant any more, and every forwarder finishes
    its segment once no block is open. If a process of a host finishes its segment, the whole
    group is finished: the forwarder reports it, and does not empty the segment before the owner
    knows it. An earlier run may have left its segment finished: who makes the group's segments
    begins such a one anew, before a forwarder looks at it.

What True means
    The gradient of an apply that returned True is in the mean of its step, unless its host was
    lost, its forwarder died or did not answer in time while others were enough, or the step was
    void, or left by `advance_step`.

    A host follows the owner with its next order. Until then its segment is at the step that the
    owner has left, and accepts gradients of it, which are dropped with that step, as on one host an
    apply right before `advance_step` is. In the same way a host that joins begins with a new
    segment at step 0, and drops what came before its first order if the owner is elsewhere.
"""
