/* The queue of waiting takes (native/protocol/wait_queue.hpp): takes, cancels, applies (which wake the head or wait).
 *
 * Modelled: TAKERS threads that each take TURNS times, with any num_required from 1 to MOST_REQUIRED (with PARTIALS
 * also 0: whatever is there). With TIMEOUTS they may give up in any wait. With LOOKS=n they may, up to n times in each
 * take, copy the round, release the lock for any time, and come back to commit. APPLIERS processes that each apply
 * GRADIENTS times. With CANCELLER one more process cancels, with ADVANCER it drops the round (advance_step), with
 * NEWCOMER it attaches, and so may get a dead process's entry. With SIBLINGS the takers 0 and 1 are threads of one
 * process. Taker t has entry t of the queue, so its ticket is ticket[t]. As in the code, leave and cancel need no lock.
 * A join is two steps: `top` and next_ticket, then the ticket.
 *
 * Abstracted, besides what README.md says: a take that waits for the lock notices a cancel and the end of its time. A
 * sleeper gets up when its futex word has changed: FUTEX_WAKE wakes it, or the end of its slice if the waker died
 * between the change and the call. If processes may be stopped, an apply's patience with a head that does not come may
 * end at any moment. Otherwise it never ends: one second is long.
 *
 * Checked, too: a take that asks for 0 takes the round only if it belongs to no waiting take. No living take is swept
 * out of the queue. A gradient that a take copied (LOOKS) is taken once, too, or dropped by advance_step. A take that
 * timed out or was cancelled consumed nothing. A cancelled take never goes on waiting. Without stops no gradient joins
 * a round that belongs to a living head.
 *
 * Unless a case says otherwise: TAKERS=2 APPLIERS=1 TURNS=1 GRADIENTS=2 MOST_REQUIRED=2 LOOKS=0
 */
#ifdef SIBLINGS
#define TAKING (TAKERS - 1)
#define process_of(t) ((t) - ((t) > 0))
#else
#define TAKING TAKERS
#define process_of(t) (t)
#endif
#if defined(CANCELLER) || defined(ADVANCER) || defined(NEWCOMER)
#define PROCESSES (TAKING + APPLIERS + 1)
#define ODD_ONE (TAKING + APPLIERS)
#else
#define PROCESSES (TAKING + APPLIERS)
#endif
#define ENTRIES (TAKING + 1)        /* participants: one for each process that takes, one that is free */
#define finished(p) (ended[p] && !holds_an_entry(p))
#define FATE_MAY_HOLD_BACK
#define ACTOR my

#include "processes.pml"

/* ---- the segment ---- */
byte count;                         /* committed */
byte ticket[TAKERS];                /* entry t is in the queue while this is not 0 */
byte required[TAKERS];
bool overdue[TAKERS];
byte top;                           /* entries from here on are free */
byte next_ticket;
byte cancelled_through;
bool cancels;                       /* a counter in the code; here there is one cancel at most */
byte token[ENTRIES];                /* participants: 0 free, else the process + 1 */

/* ---- the kernel's ---- */
byte lock_owner = NOBODY;
byte entry_lock[ENTRIES] = NOBODY;  /* held by the process that has entry i */
byte life_lock[ENTRIES] = NOBODY;   /* proof of life of the process that has entry i */
bool changed[TAKERS];               /* the entry's futex word has changed since it was read */
bool turned[APPLIERS];              /* likewise `turn`, for each apply that waits */

/* ---- the books ---- */
bool ended[PROCESSES];
bool taker_ended[TAKERS];
byte arrival[TAKERS], arrivals;     /* order of arrival; 0: does not wait */
byte applied, taken, dropped;
bool taking[TAKERS], to_be_cancelled[TAKERS];  /* its take had begun when the cancel began */

#define holds_an_entry(p) (on(NEWCOMER) && (p) == TAKING + APPLIERS)

inline kernel_drops_locks(p) {
  dropped_by(p, lock_owner);
  dropped_by(p, entry_lock[0]); dropped_by(p, life_lock[0]);
  dropped_by(p, entry_lock[1]); dropped_by(p, life_lock[1]);
  dropped_by(p, entry_lock[ENTRIES - 2]); dropped_by(p, life_lock[ENTRIES - 2]);
  dropped_by(p, entry_lock[ENTRIES - 1]); dropped_by(p, life_lock[ENTRIES - 1])
}

#include "fate.pml"

/* Acquiring and releasing the lock, and reading a futex word, are part of the step before or after: nobody
 * without the lock can tell the difference. */
#define is_last_used(t) (top > (t) && ticket[t] != 0)
#define in_use (is_last_used(TAKERS - 1) -> TAKERS : (is_last_used(1) -> 2 : is_last_used(0)))
inline Session() {
  runs(my) && lock_owner == NOBODY -> lock_owner = my; top = in_use  /* known_head */
}
inline release() {
  lock_owner = NOBODY
}

/* Reads the futex word, as the first thing under the lock; the broken variant does so later. */
#define see(word) word = (word && on(BROKEN_SEEN_LATE))
#define see_late(word) word = (word && !on(BROKEN_SEEN_LATE))

/* ---- who lives: presence.hpp ---- */
#define entry_of(t) process_of(t)   /* the takers' processes attached in order */
#define token_of(p) ((p) + 1)

#define life_byte only(BROKEN_ONE_BYTE, entry_lock) unless(BROKEN_ONE_BYTE, life_lock)
#define others_hold(e) (life_byte[e] != NOBODY && life_byte[e] != my)
#define has_token(t) (token[entry_of(t)] == token_of(process_of(t)))
#define alive(t) ((process_of(t) == my && !on(BROKEN_OWN_PRESENCE)) \
                  || ((has_token(t) || on(BROKEN_NO_TOKEN)) && others_hold(entry_of(t))))

#ifdef NEWCOMER
#define may_have_entry ((token[e] == 0 || on(BROKEN_NO_TOKEN)) && life_lock[e] == NOBODY)
inline claim() {
  do
  :: atomic { runs(my) && e < ENTRIES && entry_lock[e] != NOBODY -> e++ }
  :: atomic { runs(my) && e < ENTRIES && entry_lock[e] == NOBODY -> entry_lock[e] = my };
     if
     :: atomic { runs(my) && !may_have_entry -> skip };
        step(entry_lock[e] = NOBODY; e++)                    /* a dead process's, not swept yet */
     :: atomic { runs(my) && may_have_entry -> life_lock[e] = my };
        step(token[e] = token_of(my));
        break
     fi
  :: atomic { runs(my) && e == ENTRIES -> skip }; break      /* no room: an error */
  od
}
#endif

/* ---- the queue: wait_queue.hpp; was_cancelled: QueueEntry::check_cancelled ---- */
#define is_cancelled(t) (ticket[t] <= cancelled_through)
#define sees_cancels(t) (ticket[t] == 0 || !on(BROKEN_CANCEL_GAP))
#define was_cancelled(t) ((sees_cancels(t) && cancels != cancels_seen) || (ticket[t] != 0 && is_cancelled(t)))
#define stands(t) ((t) < top && ticket[t] != 0 && !is_cancelled(t))
#define stands_before(t, u) (stands(t) && ticket[t] < ticket[u])
#define is_head(t) (stands(t) && !stands_before(0, t) && !stands_before(1, t) && !stands_before(TAKERS - 1, t))
#define head (is_head(0) -> 0 : (is_head(1) -> 1 : (is_head(TAKERS - 1) -> TAKERS - 1 : NOBODY)))
#define is_reached(t) (count >= required[t])

inline join() {
  atomic { runs(my) && ticket[me] == 0 -> next_ticket++; top = (top > me -> top : me + 1) };
  atomic {
    runs(my) ->
    ticket[me] = next_ticket; arrivals++; arrival[me] = arrivals;
    unless(BROKEN_SEEN_LATE, release())
  }
}

inline leave(t) {
  ticket[t] = 0; arrival[t] = 0; overdue[t] = false
  only(BROKEN_TRIM, ; top = in_use)
}

inline wake_head() {
  runs(my) ->
  if :: head != NOBODY -> changed[head] = true :: else fi
}

inline turn() {
  step(turned[0] = true; turned[APPLIERS - 1] = true)
}

/* Under the lock: removes the dead from the queue, then frees their participants' entries. Each is one step
 * for all the dead: a process that dies half-way through one leaves the rest to the next sweep. */
#define to_be_swept(t) ((t) < top && ticket[t] != 0 && !alive(t))
inline sweep() {
  atomic {
    runs(my) ->
    u = 0;
    do
    :: u < TAKERS && to_be_swept(u) -> assert(dead[process_of(u)]); leave(u); u++
    :: u < TAKERS && !to_be_swept(u) -> u++
    :: u == TAKERS -> u = 0; break
    od
  };
#ifdef NEWCOMER
  atomic {
    runs(my) ->
    do
    :: u < TAKERS && has_token(u) && !alive(u) -> token[entry_of(u)] = 0; u++
    :: u < TAKERS && (!has_token(u) || alive(u)) -> u++
    :: u == TAKERS -> u = 0; break
    od
  }
#endif
}

/* ---- the books: who is first of the living, whatever the code believes ---- */
#define lives_and_waits(t) (arrival[t] != 0 && !dead[process_of(t)] && !is_cancelled(t))
#define came_before(t, a) (lives_and_waits(t) && arrival[t] < a)
#define nobody_came_before(a) (!came_before(0, a) && !came_before(1, a) && !came_before(TAKERS - 1, a))
#define is_rounds_owner(t) (lives_and_waits(t) && nobody_came_before(arrival[t]) && is_reached(t))
#define is_somebodys_round \
  (is_rounds_owner(0) || is_rounds_owner(1) || is_rounds_owner(TAKERS - 1))
#define mine_or_last (arrival[me] != 0 -> arrival[me] : 255)

/* ---- take.hpp, apply.hpp ---- */
#define dead_in_front (head != NOBODY && !alive(head))       /* living_head sweeps first */
#define served (head == NOBODY || head == me || required[me] == 0)
#define may_take (served && is_reached(me))
#define is_heads_round (head != NOBODY && head != me && is_reached(head))
#define gets_nothing (required[me] == 0 && is_heads_round && !on(BROKEN_PARTIAL_ROBS))
#define the_round (applied + taken + dropped + 1)            /* every change of the round increments one of these */
#define is_copied (on(BROKEN_LOOK_BLIND) -> copy_of != 0 : copy_of == the_round)

#define takers_ended(p) (taker_ended[(p) only(SIBLINGS, + 1)] only(SIBLINGS, && ((p) > 0 || taker_ended[0])))

proctype taker(byte me; byte my) {
  byte turns, u, looks, copy_of, copied;
  bool expired, cancels_seen;

next_take:
  if
  :: atomic { runs(my) && turns < TURNS ->
       turns++; cancels_seen = cancels; taking[me] = true;
       if
       :: required[me] = 1
       :: required[me] = MOST_REQUIRED
       only(PARTIALS, :: required[me] = 0)
       fi
     }
  :: atomic { runs(my) && turns == TURNS -> taker_ended[me] = true; ended[my] = takers_ended(my) };
     goto end
  fi;

take:
  if
  :: atomic { Session(); see(changed[me]) }
  :: atomic { runs(my) && lock_owner != NOBODY && was_cancelled(me) -> skip }; goto give_up
  only(TIMEOUTS, :: atomic { runs(my) && lock_owner != NOBODY -> skip }; goto give_up)  /* lock_deadline */
  fi;
look:
  if
  :: atomic { runs(my) && was_cancelled(me) -> lock_owner = NOBODY }; goto give_up
  :: atomic { runs(my) && !was_cancelled(me) && dead_in_front -> skip }; sweep(); goto look
#if LOOKS
  :: atomic { runs(my) && !was_cancelled(me) && !dead_in_front && may_take && !gets_nothing &&
              !is_copied && looks < LOOKS ->
       looks++; copy_of = the_round; copied = count          /* copy_of */
     };
     if
     :: atomic { runs(my) && required[me] != 0 && ticket[me] == 0 -> skip }; join()
     :: atomic { runs(my) && (required[me] == 0 || ticket[me] != 0) -> release() }
     fi;
     goto take                      /* signal handlers run; then it tries again */
#endif
  :: atomic { runs(my) && !was_cancelled(me) && !dead_in_front && may_take && !gets_nothing ->
       if :: !is_copied -> copied = count :: else fi;
       assert(required[me] == 0 || nobody_came_before(mine_or_last));
       assert(required[me] != 0 || !is_somebodys_round);
       taken = taken + copied; count = 0;                    /* consume */
       looks = 0; copy_of = 0; copied = 0
     };
     atomic { runs(my) -> leave(me); release() };
     goto tell
#ifdef PARTIALS
  :: atomic { runs(my) && !was_cancelled(me) && !dead_in_front && may_take && gets_nothing ->
       looks = 0; copy_of = 0; copied = 0; release()
     };
     goto tell
#endif
  :: atomic { runs(my) && !was_cancelled(me) && !dead_in_front && !may_take && expired ->
       release()
     };
     goto give_up
  :: atomic { runs(my) && !was_cancelled(me) && !dead_in_front && !may_take && !expired ->
       copy_of = 0; copied = 0;
       if :: !served && is_reached(head) -> changed[head] = true :: else fi
     };
     if
     :: join();
#ifndef BROKEN_SEEN_LATE
        goto take                   /* look again, now in the queue: others may have left or cancelled without the lock */
#else
        skip
#endif
     :: atomic { runs(my) && ticket[me] != 0 -> skip }
     fi;
     atomic { runs(my) -> see_late(changed[me]); release() }
  fi;

wait_turn:
  if
  :: atomic { runs(my) && changed[me] && !was_cancelled(me) -> skip }
  :: atomic { runs(my) && changed[me] && was_cancelled(me) -> skip }; goto give_up
#ifndef NO_SLICES
  :: atomic { runs(my) && dead_in_front && head != me && is_reached(me) -> skip }
#ifndef BROKEN_SLICE
  :: atomic { runs(my) && was_cancelled(me) -> skip }; goto give_up
  :: atomic { runs(my) && head == me && is_reached(me) -> skip }
#endif
#endif
  only(TIMEOUTS, :: atomic { runs(my) && !expired -> expired = true })
  fi;
  goto take;

tell:
  turn();
  atomic { wake_head(); expired = false; taking[me] = false; to_be_cancelled[me] = false };
  goto next_take;

give_up:                            /* timed out or cancelled: nothing was consumed, no lock is held */
  if
  :: atomic { runs(my) && ticket[me] != 0 -> leave(me) };
     unless(BROKEN_LEAVE_SILENT, atomic { wake_head() }; turn())
  :: atomic { runs(my) && ticket[me] == 0 -> skip }
  fi;
  step(expired = false; taking[me] = false; to_be_cancelled[me] = false; looks = 0; copy_of = 0; copied = 0);
  goto next_take;

end: skip
}

/* The head's number is reached: the round belongs to the head, unless the head is overdue. */
#define must_wait(h) (h != NOBODY && is_reached(h) && !overdue[h])

proctype applier(byte me; byte my) {
  byte gradients, h, u, patient_with;
  bool owned, reached;

apply:
  atomic { Session(); see(turned[me]) };
look:
  if
  :: atomic { runs(my) && dead_in_front -> skip }; sweep(); goto look
#ifdef BROKEN_NO_TICKET
  :: atomic { runs(my) && !dead_in_front -> h = head; owned = is_somebodys_round };
#else
  :: atomic { runs(my) && !dead_in_front && !(must_wait(head) && patient_with != ticket[head]) ->
       h = head;
       owned = is_somebodys_round;
       if :: must_wait(head) -> overdue[head] = true :: else fi
     };
     goto commit
  :: atomic { runs(my) && !dead_in_front && must_wait(head) && patient_with != ticket[head] -> h = head };
#endif
  fi;
#ifdef BROKEN_NO_TICKET
  if
  :: atomic { runs(my) && !must_wait(h) -> skip }; goto commit
  :: atomic { runs(my) && must_wait(h) && patient_with == ticket[h] -> overdue[h] = true }; goto commit
  :: atomic { runs(my) && must_wait(h) && patient_with != ticket[h] -> skip }
  fi;
#endif
  atomic { runs(my) -> see_late(turned[me]); h = 0; owned = false; release() };
  if
  :: atomic { runs(my) && turned[me] -> skip }
  unless(NO_SLICES, :: atomic { runs(my) && !(must_wait(head) && alive(head)) -> skip })
#if STOPS
  :: atomic { runs(my) && must_wait(head) && alive(head) && patient_with != ticket[head] ->
       patient_with = ticket[head] }
#endif
  fi;
  goto apply;

commit:
  atomic {
    runs(my) ->
    assert(STOPS || !owned);        /* the round was no waiting take's when this process looked */
    count++; applied++; gradients++;
    reached = (h != NOBODY && count >= required[h]);
    patient_with = 0; owned = false;
    release()
  };
  step(if :: reached -> changed[h] = true :: else fi;        /* wake */
       h = 0; reached = false; ended[my] = (gradients == GRADIENTS));
  if :: gradients < GRADIENTS -> goto apply :: else fi
}

#ifdef CANCELLER
#define books_cancel(t) to_be_cancelled[t] = taking[t]
proctype odd_one(byte my) {
  byte u;
  atomic { runs(my) -> cancels = true; books_cancel(0); books_cancel(1); books_cancel(TAKERS - 1) };
  step(cancelled_through = next_ticket);                     /* without the lock */
  do
  :: atomic { runs(my) && u < top && ticket[u] != 0 -> changed[u] = true; u++ }
  :: atomic { runs(my) && u < top && ticket[u] == 0 -> u++ }
  :: atomic { runs(my) && u >= top -> u = 0 }; break
  od;
  turn();
  step(ended[my] = true)
}
#endif
#ifdef ADVANCER
proctype odd_one(byte my) {
  atomic { Session() };
  atomic { runs(my) -> dropped = dropped + count; count = 0; release() };
  turn();
  step(ended[my] = true)
}
#endif
#ifdef NEWCOMER
proctype odd_one(byte my) {
  byte e;
  claim();
  step(e = 0; ended[my] = true)
}
#endif

/* ---- where a run ends ---- */
#define waits_in_vain(t) \
  (lives_and_waits(t) && stopped != process_of(t) && is_reached(t) && nobody_came_before(arrival[t]))
#define was_cancelled_in_vain(t) \
  (to_be_cancelled[t] && !dead[process_of(t)] && stopped != process_of(t))

active proctype quiescence() {
  byte p;
  atomic {
    timeout ->
    assert(applied == taken + count + dropped);
    if
    :: stopped == NOBODY || lock_owner != stopped ->
       for (p : 0 .. TAKERS - 1) { assert(!waits_in_vain(p)) }
       for (p : TAKING .. PROCESSES - 1) { assert(is_through(p)) }
    :: else fi;
    for (p : 0 .. TAKERS - 1) { assert(!was_cancelled_in_vain(p)) }
  }
}

init {
  byte i;
  atomic {
    for (i : 0 .. TAKING - 1) {
      entry_lock[i] = i; life_lock[i] = i; token[i] = token_of(i)
    }
    for (i : 0 .. TAKERS - 1) { run taker(i, process_of(i)) }
    for (i : 0 .. APPLIERS - 1) { run applier(i, TAKING + i) }
#ifdef ODD_ONE
    run odd_one(ODD_ONE);
#endif
    i = 0
  }
}
