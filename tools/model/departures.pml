/* Processes that are gone (native/protocol/departures.hpp, native/protocol/presence.hpp): a sweep records them, and the
 * next wait for gradients is told of them.
 *
 * Modelled: VICTIMS workers (presence.hpp), which leave in order, leave by a failure, or stay until they die;
 * SWEEPERS processes that sweep, each with the lock of a lane of its own; TELLERS processes that each, once, take all
 * locks, sweep, and are told the news. Each store to an entry or a record is a step, and so is each look for a record.
 *
 * Abstracted, besides what README.md says: processes that failed and go on, and former chiefs, are left out: each is
 * one word, which only tellers (with all locks) or the process itself change. The rest of a record is written before
 * its fate. The table has room for all: which record a full table drops does not depend on the order of steps.
 *
 * Checked: what README.md says. At the end of a run one more wait is told all that is left.
 *
 * Unless a case says otherwise: VICTIMS=1 SWEEPERS=1 TELLERS=1
 */
#define PROCESSES (VICTIMS + SWEEPERS + TELLERS)
#define OBSERVER PROCESSES
#define LANES 2
#define RECORDS (2 * VICTIMS)
#define FATE_MAY_HOLD_BACK

#include "processes.pml"

#define FREE 0
#define HERE 1
#define FAILED 2                     /* it has left by a failure */
#define WRITING 1                    /* a record that has an identity, and no fate yet */
#define NEWS 2

/* ---- the segment ---- */
byte token[VICTIMS] = HERE;
byte whose[RECORDS] = NOBODY;        /* a record's identity; NOBODY: it is free */
byte fate_of[RECORDS];

/* ---- the kernel's ---- */
byte lock[LANES] = NOBODY;

/* ---- the books ---- */
bool ended[PROCESSES + 1];
bool left[VICTIMS];                  /* it has left in order */
bool failed[VICTIMS];
byte told[VICTIMS];
bool due[VICTIMS];                   /* it was gone when the teller got the locks */

#define finished(p) ended[p]
inline kernel_drops_locks(p) {
  dropped_by(p, lock[0]); dropped_by(p, lock[1])
}

#include "fate.pml"

#define is_gone(v) (token[v] == FAILED || (token[v] == HERE && dead[v]))

/* ---- a worker ---- */
proctype victim(byte me) {
  if
  :: atomic { runs(me) -> token[me] = FREE; left[me] = true; ended[me] = true }
  :: atomic { runs(me) -> token[me] = FAILED; failed[me] = true; ended[me] = true }
  :: atomic { runs(me) -> skip }                              /* it stays, and may die */
  fi
}

/* ---- departures.hpp: entry_for, record; presence.hpp: sweep ---- */
inline entry_for() {
  step(i = 0; at = RECORDS);
  do
  :: atomic { runs(me) && i < RECORDS && whose[i] == v && !on(BROKEN_NO_LOOK) -> at = i; i = 0 }; break
  :: atomic { runs(me) && i < RECORDS && (whose[i] != v || on(BROKEN_NO_LOOK)) ->
       at = (whose[i] == NOBODY && at == RECORDS -> i : at); i++
     }
  :: atomic { runs(me) && i == RECORDS && at == RECORDS -> i = 0 }; break
  :: atomic { runs(me) && i == RECORDS && at < RECORDS && whose[at] == NOBODY -> whose[at] = v; fate_of[at] = WRITING; i = 0 };
     break
  :: atomic { runs(me) && i == RECORDS && at < RECORDS && whose[at] != NOBODY -> i = 0; at = RECORDS }     /* another took it first */
  od
}

inline record() {
  entry_for();
  step(if :: at < RECORDS -> fate_of[at] = NEWS :: else fi; at = 0)
}

inline free_entry() {
  step(token[v] = (token[v] == seen -> FREE : token[v]); seen = 0)
}

inline sweep() {
  step(v = 0);
  do
  :: atomic { runs(me) && v < VICTIMS && !is_gone(v) -> v++ }
  :: atomic { runs(me) && v < VICTIMS && is_gone(v) -> seen = token[v] };
     only(BROKEN_FREE_FIRST, free_entry();)
     record();
     unless(BROKEN_FREE_FIRST, free_entry();)
     step(v++)
  :: atomic { runs(me) && v == VICTIMS -> v = 0 }; break
  od
}

proctype sweeper(byte me; byte lane) {
  byte v, i, at, seen;
  atomic { runs(me) && lock[lane] == NOBODY -> lock[lane] = me };
  sweep();
  step(lock[lane] = NOBODY; ended[me] = true)
}

/* ---- departures.hpp: news, tell ---- */
#define is_news(x) (whose[x] != NOBODY && (fate_of[x] == NEWS || on(BROKEN_HALF_READ)))

inline tell() {
  step(v = 0);
  do
  :: v < VICTIMS ->
     step(i = 0);
     do
     :: atomic { runs(me) && i < RECORDS && whose[i] == v && is_news(i) ->
          assert(!left[v] && (dead[v] || failed[v]));
          told[v]++;
          assert(told[v] == 1);
          whose[i] = NOBODY; fate_of[i] = FREE; i++
        }
     :: atomic { runs(me) && i < RECORDS && !(whose[i] == v && is_news(i)) -> i++ }
     :: atomic { runs(me) && i == RECORDS -> i = 0 }; break
     od;
     step(v++)
  :: v == VICTIMS -> step(v = 0); break
  od
}

inline acquire_all() {
  atomic { runs(me) && lock[0] == NOBODY -> lock[0] = me };
  unless(BROKEN_ONE_LOCK, atomic { runs(me) && lock[1] == NOBODY -> lock[1] = me })
}
inline release() {
  step(if :: lock[1] == me -> lock[1] = NOBODY :: else fi);
  step(lock[0] = NOBODY)
}

proctype teller(byte me) {
  byte v, i, at, seen;
  acquire_all();
  atomic { runs(me) -> due[0] = (dead[0] || failed[0]); due[VICTIMS - 1] = (dead[VICTIMS - 1] || failed[VICTIMS - 1]) };
  unless(BROKEN_TELL_FIRST, sweep();)
  tell();
  /* A process that was gone when the teller got the locks has been told of by now. */
  step(assert(!due[0] || told[0] == 1); assert(!due[VICTIMS - 1] || told[VICTIMS - 1] == 1));
  release();
  step(ended[me] = true)
}

/* ---- the end of a run: one more wait, by a process that never dies ---- */
active proctype observer() {
  byte me = OBSERVER, v, i, at, seen;
  atomic { timeout -> skip };
  acquire_all();
  sweep();
  tell();
  atomic {
    for (v : 0 .. VICTIMS - 1) {
      assert(told[v] == (!left[v] && (dead[v] || failed[v]) -> 1 : 0));
      assert(token[v] == (left[v] || dead[v] || failed[v] -> FREE : HERE))
    };
    for (i : 0 .. RECORDS - 1) { assert(whose[i] == NOBODY) }
  }
}

init {
  byte p;
  atomic {
    for (p : 0 .. VICTIMS - 1) { run victim(p) }
    for (p : VICTIMS .. VICTIMS + SWEEPERS - 1) { run sweeper(p, (p - VICTIMS) % LANES) }
    for (p : VICTIMS + SWEEPERS .. PROCESSES - 1) { run teller(p) }
    p = 0
  }
}
