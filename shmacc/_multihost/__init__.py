"""One group over many hosts: the protocol, without an engine.

The modules here are state machines. They do no I/O, start no threads and read no clocks: a driver
passes messages and the time to them, and does what they ask for. `shmacc.ray` drives them with
actors, the tests with a transport that drops, doubles and delays messages. (segment.py is the
exception: it does a forwarder's actions on a real group.)

The parts
    host       Has a segment, an ordinary group. Its workers know nothing of the protocol.
    forwarder  One for each host (forwarder.py): makes the segment follow the owner.
    owner      One (owner.py, rounds.py): keeps the step, counts gradients, and decides which
               gradients a round has. It never sees a row.
    shards     One or more (shard.py), on living hosts: keep the sums that hosts send (pieces.py).
    chief      Any process that calls `round` or `take`; several wait in the queue at the owner.

A round
    1. Hosts report how many gradients their segments have. A chief asks for `required` of them.
    2. Once there are that many, the owner makes a *grant*: it orders all hosts to hold their
       segments, and to send what is in them to the shards. A forwarder *holds* its segment: it
       opens a round there, also if the segment is empty. It *ships* the sums to the shards, in
       pieces. Then it reports its *batch*: the count, the contributors, and which shards have a
       piece.
    3. Once all living hosts have reported their batches, the owner fixes these as the members of
       the round. The chief has the shards add up exactly these pieces, and its block begins. (If
       enough gradients are there, the owner waits no longer than `grace` for hosts that have not
       even held; a grant ends in any case after `expiry`.)
    4. When the block ends, the owner moves the step on by one. Each forwarder consumes its
       segment's round, which moves the segment's step on and wakes its workers. If the block
       raises, each forwarder gives its segment's round up. The segments keep their gradients: the
       next round has them, with those that have come since.

Why nothing is lost, doubled or stale

    Invariant 1. The segment is the truth, and what is shipped is a copy: the segment keeps the
    gradients until the owner has moved the step on. So the death of a shard or a forwarder, a
    chief's exception, and lost messages cost time and no gradient.

    Invariant 2. A fence is the number of times that gradients were consumed or dropped. A host
    reports the fence of its segment's content, and the owner counts the content only if that is
    its own fence. Only the owner moves the fence on, when a round is consumed or gradients are
    dropped. A forwarder takes the new fence over in the same commit that empties the segment. So no
    gradient is a member of two rounds, and none of an older step gets into a later round. The step
    alone cannot ensure this: `set_global_step` may set a step that was there before. With
    parameters the step only goes up, so step and copy do it: a segment at the owner's step, with
    the right copy, takes the owner's fence over as it is.

    Invariant 3. A batch belongs to one grant, a grant to one fence, and no two grants of any owners
    have the same number. For each grant each host ships what it has under a new name (host,
    incarnation, grant), and the chief asks for pieces by these names. So all pieces of a batch are
    at the shards that its grant named, and none has the content of another grant. A shard that was
    out of reach and is back is asked for nothing.

    Invariant 4. Messages carry whole states, not events: a report has all that the owner must know
    of a host, the order all that the host must do. Each has a number, and one with a lower number
    than the last is thrown away. So the next message repairs what the loss, repetition or delay of
    one has done, and a host cannot miss a grant that was made while it learnt of a step.

What dies, and what that costs
    worker     As with one host: its last gradient is in the segment wholly or not at all.
    forwarder  Its round in the segment ends: the segment accepts gradients again, and keeps those
               that it has. The next incarnation holds, ships and reports again; reports of a lower
               one are refused. Until its first report nobody knows what the segment has: a grant
               waits for that report, for the host's lease at most, and a failed grant is made again
               although other hosts have too few gradients. If the dead one's batch was already in a
               round, gradients that came in between are dropped with the step, although their
               applies returned True.
    host       After `lease` without a report its gradients do not count, until it reports again. A
               grant goes on without it, if it has no shard. What is in an open block stays there.
    shard      Dies with its host. A grant with a shard on a lost host ends at once. A chief
               that finds pieces missing says so. In both cases the owner makes another grant in
               the same moment: hosts stay held, and ship to shards on living hosts.
    link       Between two hosts that both reach the owner: neither can ship to shards on the other.
               Their grant ends by its `expiry`; from then on neither has a shard
               (`Hosts.note_cuts`).
    chief      The queue forgets it after `chief_lease`. If it was in its block, nothing is
               consumed, unless its update of parameters is committed: then the owner ends the
               round. Unlike on one host, a chief that was only stopped for that long has lost its
               round, too: the end of its block raises.
    owner      If the group has parameters, the next one learns the step from their copies
               (copies.py), and goes on with a chief's block (`resume`). Without parameters, only
               the chief can know whether the last round was consumed: the next owner refuses rounds
               until `set_global_step`. Segments that are at that step keep their gradients, the
               others start empty. The owner's `term` is part of all its numbers, so what its
               predecessor said is thrown away. A term is the time at which its owner was made. The
               clock of a new owner's node may be behind: so hosts report the latest term that they
               know, and the owner changes to a later one; if it leads copies already, it ends.

Void steps
    A void step ends without a round. The step moves on by one, its gradients are dropped, and
    workers, which follow the step, compute new ones, for which the chief waits. Reasons:

    A contributor at two hosts. Within a host the segment ensures that a contributor is in a round
    once. If a worker is restarted on another host after its first gradient was accepted, both
    segments have accepted one, and sums cannot be taken apart again. In the next step a worker that
    has moved is at one host only. If the contributor is at two hosts again before a round has come,
    living processes on both apply as the same contributor: at every second such step the chief gets
    an error, until one of them is ended.
      The owner compares the batches' contributors just before it fixes a round's members, when
    nobody has seen the round yet. Cost: eight bytes for each contributor and round; one step for
    each worker that is restarted elsewhere in the step of its first apply. Rejected: refusing one
    host's batch alone, since its other workers would wait for a step that does not come; keeping
    contributors' gradients apart, since then hosts would ship all of them instead of their sums.

    Too few gradients after all. Hosts that hold for a grant refuse gradients; then other hosts are
    lost, and too few gradients are left. Workers whose gradients were refused wait for the next
    step. (On one host they do so too, but there the round always comes.) To find out whether any
    was refused, each host would have to record it for each grant; a void step is cheaper.

    In doubt, and nothing comes. Sometimes nobody knows whether workers wait in this way: an owner
    has died; a step was set while hosts were held, or it emptied a segment at its own step; or a
    host is lost after a round was given up. If a chief then waits for more gradients, and nothing
    comes for `chief_lease`, the step is void, once. A block that raises is no such case: its
    gradients are all kept.

The end
    `finish` ends the run for good: the owner makes no grant any more, and each forwarder finishes
    its segment once no block is open. If a process of a host finishes its segment, the whole group
    is finished: the forwarder reports it, and does not empty the segment before the owner knows.
    An earlier run may have left its segment finished: the host's actor begins such a segment anew,
    before its forwarder looks at it.

What True means
    The gradient of an apply that returned True is in the mean of its step, unless its host was
    lost, its forwarder died or did not answer in time while others were enough, or the step was
    void, or left by `advance_step`.

    A host moves to a new step with its next order. Until then its segment accepts gradients of the
    old step. They are dropped, like those that are applied right before `advance_step` on one host.
    Likewise, a host that joins begins with a new segment at step 0, and what that accepts before
    its first order is dropped if the owner is at another step.
"""
