/* Rounds, lanes and contributors (native/accumulators/take.hpp, apply.hpp), and who wakes a waiting take.
 *
 * Modelled: CHIEFS processes each take TURNS times, with any num_required from 1 to MOST_REQUIRED, directly or as a
 * round (open it, run a block, end the block in order or by an exception). With CLOSER a thread of the first chief
 * gives up that chief's round at any time, as close() does. WORKERS processes each apply GRADIENTS times, in any of
 * LANES lanes, each of which has a lock; a gradient is for the step at which its worker read the parameters, or never
 * stale. With CONTRIBUTORS all workers are the same contributor: one that was killed, or only stopped, and started
 * again. With PARTIAL one more process applies, with all lanes' locks, a partial that has this contributor too. With
 * ADVANCER, SETTER or FINISHER one more process calls advance_step, set_step or finish at any time.
 *
 * Abstracted, besides what README.md says: timeouts, cancels, and applies that wait for a head are in line.pml. A
 * futex word is a flag: whether it changed since it was last read (changed, progressed). Nobody tries again for all
 * locks while the missing one is still held. Memory is sequentially consistent but for one thing: others see what a
 * lane has committed only after a full_barrier, or once the lane's lock is free (buffered).
 *
 * Checked, in more detail: gradients that a round handed out and did not consume are in the next take, unless
 * advance_step dropped them. While a living process has a round open, even a stopped one, nothing joins the round and
 * nobody takes it. While all rounds end in order, a gradient for a step is accepted only if no block began since its
 * worker read the parameters. If an apply says that its contributor is in the round, it is. A take that began after
 * finish takes nothing, and an apply is refused. Every living process gets through, except takes whose number is not
 * reached, and processes that wait for a stopped one: it has a lock that they need, or the round, or a lock that the
 * round's holder needs. With -DNO_SLICES (no deaths, no stops) wake-ups suffice.
 *
 * Unless a case says otherwise: CHIEFS=2 WORKERS=1 TURNS=1 GRADIENTS=2 LANES=2 MOST_REQUIRED=2
 */
#ifdef PARTIAL
#define APPLYING (WORKERS + 1)      /* the last is the partial's */
#else
#define APPLYING WORKERS
#endif
#if defined(ADVANCER) || defined(SETTER) || defined(FINISHER)
#define PROCESSES (CHIEFS + APPLYING + 1)
#define CHANGER (CHIEFS + APPLYING)
#else
#define PROCESSES (CHIEFS + APPLYING)
#endif
#define finished(p) ended[p]
#define FATE_MAY_HOLD_BACK

#include "processes.pml"

/* ---- the segment ---- */
byte round_now = 1;                 /* RoundState */
byte step_now = 1;
byte holder = NOBODY;
byte holder_serial;                 /* 0: no round is open */
byte opened;
byte gave_up[CHIEFS];               /* Participant::given_up */
bool is_finished;                   /* Header::finished */
byte spread;
byte lane_round[LANES];             /* LaneState; the round that the next three belong to */
byte lane_count[LANES];
byte lane_set[LANES];               /* the gradients, a bit each */
bool lane_has[LANES];               /* it has the contributor's gradient */
bool buffered[LANES];               /* others do not see the last gradient yet */
byte first = NOBODY, second = NOBODY;  /* in the queue */
byte required[CHIEFS];

/* ---- the kernel's ---- */
byte lock[LANES] = NOBODY;
bool changed[CHIEFS];               /* the entry's futex word has changed since it was read */
bool progressed[PROCESSES];         /* likewise `progress`, for each apply that waits */

/* ---- the books ---- */
bool ended[PROCESSES];
byte wants[PROCESSES];              /* the lane whose lock it needs, or ALL */
byte accepted, consumed, discarded; /* gradients */
byte owed;                          /* gradients handed out by a round that has not been consumed */
byte in_round;                      /* how often the contributor is in the round */
byte blocks;                        /* rounds that were opened: each block changes the parameters */
bool disorder;                      /* a round did not end in order */

#define ALL LANES
#define NEVER_STALE 255
inline unlock(p, x) {
  if :: lock[x] == p -> lock[x] = NOBODY; buffered[x] = false :: else fi
}
inline kernel_drops_locks(p) { unlock(p, 0); unlock(p, LANES - 1) }

#include "fate.pml"

#define set_of(x) (lane_round[x] == round_now -> lane_set[x] : 0)
#define count_of(x) (lane_round[x] == round_now -> lane_count[x] : 0)
#define has(x) (lane_round[x] == round_now && lane_has[x])
#define pending (set_of(0) | set_of(LANES - 1))
#define total (count_of(0) + (LANES > 1 -> count_of(LANES - 1) : 0))
#define seen_total(mine) (total - (LANES > 1 -> buffered[LANES - 1 - (mine)] : 0))
#define has_anywhere (has(0) || has(LANES - 1))

/* ---- session.hpp: HeldLocks ---- */
inline acquire_all() {
  do
  :: atomic { runs(me) && lock[0] == NOBODY -> lock[0] = me };
#if LANES == 1
     break
#else
     if
     :: atomic { runs(me) && lock[1] == NOBODY -> lock[1] = me }; break
#if !defined(BROKEN_HOLDS_ON) && !defined(BROKEN_ANY_ORDER)
     :: atomic { runs(me) && lock[1] != NOBODY -> lock[0] = NOBODY };     /* a slice is over */
        atomic { runs(me) && lock[1] == NOBODY -> skip }
#endif
     fi
#ifdef BROKEN_ANY_ORDER
  :: atomic { runs(me) && lock[1] == NOBODY -> lock[1] = me };
     atomic { runs(me) && lock[0] == NOBODY -> lock[0] = me }; break
#endif
#endif
  od
}

inline release(wants_next) {
#if LANES > 1
  step(unlock(me, 1));
#endif
  step(unlock(me, 0); wants[me] = wants_next)
}

/* ---- wait_queue.hpp ---- */
inline join() {
  if :: first == NOBODY -> first = me :: first != NOBODY && first != me && second == NOBODY -> second = me
  :: else fi
}
inline leave(c) {
  if
  :: first == c -> first = second; second = NOBODY
  :: second == c -> second = NOBODY
  :: else fi
}
#define dead_in_front (first != NOBODY && dead[first])
/* Reads the futex word first thing under the lock, then sweeps. One step, since a process that dies in a sweep
 * leaves the rest to the next sweep. */
inline see_and_sweep(word) {
  step(word = false;
       if :: dead_in_front -> leave(first) :: else fi;
       if :: dead_in_front -> leave(first) :: else fi)
}
inline announce_progress() {
  step(progressed[CHIEFS] = true; progressed[CHIEFS + APPLYING - 1] = true; progressed[CHIEFS + (APPLYING > 1)] = true)
}
inline wake_head() {
  step(if :: first != NOBODY -> changed[first] = true :: else fi)
}

/* ---- take.hpp, apply.hpp, step.hpp ---- */
#define really_open (holder_serial != 0 && !dead[holder] && gave_up[holder] < holder_serial)
#define round_is_open \
  (holder_serial != 0 && (on(BROKEN_DEAD_HOLDER) || !dead[holder]) \
   && (on(BROKEN_DEAD_HOLDER) || on(BROKEN_GIVEN_UP_SEEN) || gave_up[holder] < holder_serial) \
   && !(on(BROKEN_STOP_IS_DEATH) && stopped == holder))

/* The new round's number makes all lanes empty. */
inline next_round() {
  round_now++;
  step_now++;
  only(BROKEN_ADVANCE_KEEPS, if :: holder == me || !really_open -> holder_serial = 0; holder = NOBODY :: else fi;)
  unless(BROKEN_ADVANCE_KEEPS, holder_serial = 0; holder = NOBODY;)
  owed = 0; in_round = 0
}

inline commit_of_round(wants_next) {  /* ends an operation after which others may go on */
  release(wants_next);
  unless(BROKEN_SILENT_END, unless(BROKEN_SILENT_APPLIES, announce_progress();))
  unless(BROKEN_SILENT_END, wake_head())
}

inline check_taken() {
  assert(!really_open);
  assert((pending & (consumed | discarded)) == 0);          /* in one take only */
  assert((owed & ~pending) == 0)                           /* a round that was not consumed is still there */
}

#define is_free_to_take ((!round_is_open || on(BROKEN_ROBS)) && (first == NOBODY || first == me))
#define is_ended (is_finished only(BROKEN_FINISH_BEFORE, && !joined))
#define may_take (is_free_to_take && total >= required[me] && !is_ended)

inline open_round() {
  atomic {
    runs(me) && may_take ->
    check_taken();
    if :: holder_serial != 0 -> disorder = true :: else fi;   /* a dead process had it open */
    blocks++;
    opened++; serial = opened; holder_serial = serial; holder = me;
    handed = pending; owed = handed;
    assert(!after_finish);
    only(BROKEN_CONSUMES_EARLY, round_now++; step_now++; in_round = 0;)
    leave(me)
  }
}

inline consume() {
  atomic {
    runs(me) && may_take ->
    check_taken();
    if :: holder_serial != 0 && holder != me -> disorder = true :: else fi;
    consumed = consumed | pending;
    assert(!after_finish);
    next_round();
    leave(me)
  }
}

#define is_its_own \
  (on(BROKEN_BLIND_CLOSE) || (holder_serial == serial && (on(BROKEN_GIVEN_UP) || gave_up[me] < serial)))
inline consume_round() {
  acquire_all();
  if
  :: atomic { runs(me) && !is_its_own -> assert(holder != me || gave_up[me] >= serial); serial = 0; handed = 0 };
     release(ALL)
  :: atomic {
       runs(me) && is_its_own ->
#ifdef BROKEN_CONSUMES_EARLY
       consumed = consumed | handed; holder_serial = 0; holder = NOBODY; owed = 0;
#else
       assert(holder == me);
       assert(pending == handed);                             /* nothing joined, nothing went */
       consumed = consumed | pending;
       next_round();
#endif
       serial = 0; handed = 0
     };
     commit_of_round(ALL)
  fi
}
/* One store, without a lock. The round is recorded as open until the next commit. */
inline give_up_round(which) {
  step(gave_up[me] = (gave_up[me] < which -> which : gave_up[me]); disorder = true);
  announce_progress();
  wake_head()
}

#ifdef CLOSER
proctype closer(byte me) {            /* a thread of the first chief, which may have a round open */
  byte which;
  if
  :: atomic { runs(me) && holder_serial != 0 && holder == me -> which = holder_serial }; give_up_round(which)
  :: atomic { runs(me) -> skip }
  fi
}
#endif

proctype chief(byte me) {
  byte turns, serial, handed;
  bool after_finish, joined;

  do
  :: turns < TURNS ->
     atomic {
       runs(me) ->
       turns++;
       after_finish = is_finished; joined = false;
       wants[me] = ALL;
       if :: required[me] = 1 :: required[me] = MOST_REQUIRED fi
     };
     do
     :: acquire_all();
        see_and_sweep(changed[me]);
        if
        :: open_round(); commit_of_round(ALL); break
        :: consume(); commit_of_round(ALL); break
        :: atomic { runs(me) && !may_take && is_ended -> leave(me) };     /* an error */
           release(NOBODY);
           wake_head(); break
        :: atomic { runs(me) && !may_take && !is_ended -> join(); joined = true };
           release(NOBODY);
           if
           :: atomic { runs(me) && changed[me] -> wants[me] = ALL }
#ifndef NO_SLICES
           :: atomic { runs(me) && (is_finished || !round_is_open && total >= required[me] &&
                       (first == me || first == NOBODY || dead_in_front)) -> wants[me] = ALL }
#endif
           fi
        fi
     od;
     if
     :: serial != 0 -> consume_round()       /* after the block */
     :: serial != 0 -> give_up_round(serial); step(serial = 0; handed = 0)
     :: else fi;
     step(ended[me] = (turns == TURNS))
  :: else -> break
  od
}

#define contributes on(CONTRIBUTORS)
#define OWN_LANE (LANES - 1)        /* the contributor's */
#define is_partial (me == CHIEFS + WORKERS)

#define is_over (is_finished && !on(BROKEN_FINISH_UNSEEN))
#define is_kept_open (round_is_open && !on(BROKEN_JOINS))
#define is_refused (computed_for < step_now || (is_kept_open && computed_for == step_now) || is_over)
#define must_wait (is_kept_open && !is_refused)
#define must_look_everywhere (contributes && !everywhere && spread == round_now && !on(BROKEN_SPREAD_UNSEEN))
#ifdef BROKEN_LOOK_FREE
#define has_contributor (contributes && had)
#else
#define has_contributor (contributes && (everywhere -> has_anywhere : has(l)))
#endif

inline mark_spread() {
  step(if :: everywhere && contributes -> spread = round_now :: else fi)
}

inline acquire_one() {
  atomic {
    runs(me) && !everywhere ->
    if
    :: contributes -> l = OWN_LANE
    :: !contributes || on(BROKEN_ANY_LANE) -> l = 0
    :: !contributes -> l = LANES - 1
    fi;
    wants[me] = l
  };
  atomic { runs(me) && lock[l] == NOBODY -> lock[l] = me }
}

inline put_in() {
  unless(BROKEN_SPREAD_LATE, mark_spread();)
  atomic {
    runs(me) ->
    assert(!really_open);
    assert(!began_after);
    assert(computed_for == NEVER_STALE || disorder || holder_serial != 0 || blocks_before == blocks);
    if
    :: lane_round[l] != round_now ->
       lane_round[l] = round_now; lane_count[l] = 0; lane_set[l] = 0; lane_has[l] = false
    :: else fi;
    lane_count[l]++;
    lane_set[l] = lane_set[l] | gradient;
    buffered[l] = true;
    accepted = accepted | gradient;
    if :: contributes -> lane_has[l] = true; in_round++ :: else fi;
    assert(in_round <= 1);
    head = first
  };
  only(BROKEN_SPREAD_LATE, mark_spread();)
  wake_head_if_reached()
}

/* `head` may be read before the commit: nobody can join the queue while this lane's lock is held. */
inline wake_head_if_reached() {
  unless(BROKEN_NO_BARRIER, step(buffered[l] = false);)  /* full_barrier */
  atomic { runs(me) -> reached = (head != NOBODY && seen_total(l) >= required[head]) };
  release(NOBODY);
  step(if :: reached -> changed[head] = true :: else fi; reached = false; head = 0)
}

proctype applier(byte me) {
  byte gradients, l, gradient, computed_for, blocks_before, head;
  bool everywhere, reached, began_after;
  only(BROKEN_LOOK_FREE, bool had;)

  do
  :: gradients < GRADIENTS ->
     atomic {
       runs(me) ->                  /* it reads the parameters */
       if :: computed_for = step_now :: computed_for = NEVER_STALE fi;
       blocks_before = blocks;
       began_after = is_finished;
       gradient = 1 << ((me - CHIEFS) * GRADIENTS + gradients);
       gradients++;
       everywhere = is_partial
     };
     do
     ::
        only(BROKEN_LOOK_FREE, step(had = has(OWN_LANE));)
        if
#ifdef BROKEN_SPREAD_ONE_LOCK
        :: atomic { runs(me) && everywhere && lock[0] == NOBODY -> lock[0] = me; wants[me] = 0; l = 0 }
#else
        :: atomic { runs(me) && everywhere -> l = 0; wants[me] = ALL };
           acquire_all()
#endif
        :: acquire_one()
        fi;
        see_and_sweep(progressed[me]);
        if
        :: atomic { runs(me) && is_refused -> skip };         /* False */
           release(NOBODY); break
        :: atomic { runs(me) && must_wait -> skip };
           release(NOBODY);
           if
           :: atomic { runs(me) && progressed[me] -> skip }
           unless(NO_SLICES, :: atomic { runs(me) && (is_finished || !round_is_open) -> skip })
           fi
        :: atomic { runs(me) && !is_refused && !must_wait && must_look_everywhere -> everywhere = true };
           release(NOBODY)
        :: atomic { runs(me) && !is_refused && !must_wait && !must_look_everywhere && has_contributor ->
             assert(in_round == 1) };                         /* returns True; a partial raises */
           release(NOBODY); break
        :: atomic { runs(me) && !is_refused && !must_wait && !must_look_everywhere && !has_contributor -> skip };
           put_in(); break
        fi
     od;
     step(l = 0; gradient = 0; computed_for = 0; blocks_before = 0; everywhere = false; began_after = false;
          ended[me] = (gradients == GRADIENTS))
  :: else -> break
  od
}

#ifdef ADVANCER
inline advance_step() {
  atomic {
    runs(me) ->
    discarded = discarded | pending;
    if :: really_open -> disorder = true :: else fi;
    next_round()
  }
}
#define change_step advance_step
#endif
#ifdef SETTER
inline set_step() {
  step(step_now++;
       if :: holder_serial != 0 -> disorder = true :: else fi;
       holder_serial = 0; holder = NOBODY)
}
#define change_step set_step
#endif
#ifdef FINISHER
inline finish() {                     /* one store, then wakes all who wait */
  step(is_finished = true);
#ifndef BROKEN_SILENT_FINISH
  step(if :: first != NOBODY -> changed[first] = true :: else fi;
       if :: second != NOBODY -> changed[second] = true :: else fi);
  announce_progress()
#endif
}
#endif
#ifdef CHANGER
proctype changer(byte me) {
#ifdef FINISHER
  finish();
#else
  step(wants[me] = ALL);
  acquire_all();
  change_step();
  commit_of_round(NOBODY);
#endif
  step(wants[me] = NOBODY; ended[me] = true)
}
#endif

/* ---- where a run ends ---- */
#define stopped_has(x) (stopped != NOBODY && lock[x] == stopped)
#define is_kept_out(p) \
  ((wants[p] == ALL && (stopped_has(0) || stopped_has(LANES - 1))) \
   || (wants[p] < ALL && stopped_has(wants[p])))
/* Its holder is stopped, or waits for a lock that a stopped process has. */
#define round_is_kept (really_open && (stopped == holder || is_kept_out(holder)))
#define has_nothing_to_take(p) (wants[p] == NOBODY && !is_finished && (total < required[p] || first != p))

active proctype quiescence() {
  byte p;
  atomic {
    timeout ->
    for (p : 0 .. PROCESSES - 1) {
      assert(is_through(p) || round_is_kept || is_kept_out(p) || (p < CHIEFS && has_nothing_to_take(p)))
    }
    assert(accepted == (consumed | discarded | pending));
    assert((consumed & discarded) == 0 && (pending & (consumed | discarded)) == 0);
    p = 0
  }
}

init {
  byte p;
  atomic {
    for (p : 0 .. CHIEFS - 1) { run chief(p) }
    for (p : CHIEFS .. CHIEFS + APPLYING - 1) { run applier(p) }
#ifdef CHANGER
    run changer(CHANGER);
#endif
    only(CLOSER, run closer(0);)
    p = 0
  }
}
