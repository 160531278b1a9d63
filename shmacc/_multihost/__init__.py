"""One group over many hosts: the protocol, without an engine.

The modules here are state machines. They do no I/O, start no threads and read no clocks: a driver
passes messages and the time to them, and does what they ask for. `shmacc.ray` drives them with
actors, the tests with a transport that drops, doubles and delays messages. (segment.py is the
exception: it does a forwarder's actions on a real group.)

The parts
    host       Has a segment, an ordinary group. Its workers do not know of the protocol.
    forwarder  Each host has one (forwarder.py). It makes the segment follow the owner.
    owner      The group has one (owner.py, rounds.py). It keeps the step, counts gradients, and
               decides which gradients a round has. It never sees a row.
    shards     One or more (shard.py), on living hosts: keep the sums that hosts send (pieces.py).
    chief      Any process that calls `round` or `take`. Several chiefs queue at the owner.

A round
    1. Hosts report how many gradients their segments have. A chief asks for `required` gradients.
    2. Once there are enough, the owner makes a *grant*: it orders all hosts to hold their segments
       and to send the contents to the shards. A forwarder *holds* its segment: it opens a round
       there, even if the segment is empty. It *ships* (sends) the sums to the shards, in pieces.
       Then it reports its *batch*: the count, the contributors, and which shards have a piece.
    3. Once all living hosts have reported their batches, the owner fixes these as the members of
       the round. The chief has the shards add up exactly these pieces, and its block begins. (If
       there are enough gradients, the owner waits no longer than `grace` for hosts that do not
       hold their segments yet. A grant ends in any case after `expiry`.)
    4. When the block ends, the owner moves the step on by one. Each forwarder consumes its
       segment's round, which moves the segment's step on and wakes its workers. If the block
       raises, each forwarder gives its segment's round up. The segments keep their gradients: the
       next round has them, together with newer ones.

Why nothing is lost, doubled or stale

    Invariant 1. Hosts ship only copies: the segment keeps the gradients until the owner has moved
    the step on. So the death of a shard or a forwarder, a chief's exception, and lost messages
    cost time but no gradient.

    Invariant 2. A fence is the number of times that gradients were consumed or dropped. A host
    reports the fence of its segment's content. The owner counts the content only if the fence
    equals its own. Only the owner moves the fence on, when a round is consumed or gradients are
    dropped. A forwarder takes over the new fence in the same commit that empties the segment. So no
    gradient is a member of two rounds, and no gradient of an older step gets into a later round.
    The step alone cannot ensure this: `set_global_step` may go back to an earlier step. With
    parameters the step only goes up, so step and copy do ensure it: a segment at the owner's step,
    with the right copy, takes over the owner's fence and keeps its gradients.

    Invariant 3. A batch belongs to one grant, and a grant to one fence. No two grants have the same
    number, even of different owners. For each grant each host ships its content under a new name
    (host, incarnation, grant), and the chief asks for pieces by these names. So all pieces of a
    batch are at the shards that its grant named, and no piece has the content of another grant. A
    shard that was out of reach and has come back is not asked for old pieces.

    Invariant 4. Messages carry whole states, not events: a report has all that the owner must know
    of a host, an order all that the host must do. Messages are numbered, and a message with a lower
    number than the last is thrown away. So if a message is lost, repeated or late, the next one
    repairs it, and a host cannot miss a grant that was made while it learnt of a step.

What dies, and what that costs
    worker     As on one host: the segment has its last gradient wholly or not at all.
    forwarder  Its round in the segment ends: the segment accepts gradients again, and keeps its
               content. The next incarnation holds, ships and reports again; the owner refuses
               reports of a lower incarnation. Until the first report nobody knows the segment's
               content: a grant waits for that report, at most for the host's lease, and a failed
               grant is made again although other hosts have too few gradients. If the dead
               forwarder's batch was already in a round, gradients that came after it are dropped
               with the step, although their applies returned True.
    host       After `lease` without a report its gradients do not count, until it reports again. A
               grant goes on without it, if it has no shard. An open block keeps its gradients.
    shard      Dies with its host. A grant with a shard on a lost host ends at once. A chief
               that finds pieces missing says so. In both cases the owner makes another grant at
               once: hosts stay held, and ship to shards on living hosts.
    link       Between two hosts that both reach the owner: neither can ship to shards on the other.
               Their grant ends by its `expiry`; from then on neither has a shard
               (`Hosts.note_cuts`).
    chief      The queue forgets it after `chief_lease`. If it was in its block, nothing is
               consumed. But if its update of parameters is committed, the owner ends the round.
               Unlike on one host, a chief that was only stopped for that long has lost its round,
               too: the end of its block raises.
    owner      With parameters, the next owner learns the step from their copies (copies.py), and
               goes on with a chief's block (`resume`). Without parameters, only the chief can
               know whether the last round was consumed: the next owner refuses rounds until
               `set_global_step`. Segments at that step keep their gradients, the others start
               empty. The owner's `term` is part of all its numbers, so messages of its predecessor
               are thrown away. A term is the time at which its owner was made. The clock of a new
               owner's node may be behind: so hosts report the latest term that they know, and the
               owner changes to a later term. If it leads copies already, it ends instead.

Void steps
    A void step ends without a round. The step moves on by one, its gradients are dropped, and
    workers, which follow the step, compute new ones, for which the chief waits. Reasons:

    A contributor at two hosts. Within a host the segment ensures that a contributor is in a round
    once. If a worker is restarted on another host after its first gradient was accepted, both
    segments may accept its gradient, and sums cannot be taken apart again. In the next step a
    worker that has moved is at one host only. If the contributor is at two hosts again before a
    round comes, living processes on both hosts apply as the same contributor. Then the chief gets
    an error, at every second such step, until one of these processes ends.
      The owner compares the batches' contributors just before it fixes a round's members, when
    nobody has seen the round yet. This costs eight bytes for each contributor and round, and one
    step if a worker is restarted elsewhere in the step of its first apply. Rejected: refusing one
    host's batch alone, since its other workers would wait for a step that does not come; keeping
    contributors' gradients apart, since then hosts would ship all of them instead of their sums.

    Too few gradients after all. Hosts that hold for a grant refuse gradients. If other hosts are
    then lost, too few gradients are left, and workers whose gradients were refused wait for the
    next step. (On one host they wait too, but there the round always comes.) Each host could record
    for each grant whether it refused a gradient, but a void step is cheaper.

    In doubt, and nothing comes. Sometimes nobody knows whether workers wait in this way: an owner
    has died; a step was set while hosts were held; a segment was emptied that was already at the
    step that was set; or a host is lost after a round was given up. If a chief then waits for more
    gradients, and nothing comes for `chief_lease`, the step is void, once. A block that raises is
    no such case: its gradients are all kept.

The end
    `finish` ends the run for good: the owner makes no more grants, and each forwarder finishes
    its segment once no block is open. If a process of a host finishes its segment, the whole group
    is finished: the forwarder reports it, and does not empty the segment before the owner knows.
    An earlier run may have left its segment finished: the host's actor begins such a segment anew,
    before its forwarder looks at it.

What True means
    The gradient of an apply that returned True is in the mean of its step, with these exceptions:
    its host was lost; its forwarder died, or answered too late while the others had enough
    gradients; the step was void, or was left by `advance_step`.

    A host moves to a new step with its next order. Until then its segment accepts gradients of the
    old step and drops them later, like gradients applied right before `advance_step` on one host.
    Likewise, a host that joins begins with a new segment at step 0. What this segment accepts
    before its first order is dropped if the owner is at another step.
"""
