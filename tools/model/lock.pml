/* The lock (native/protocol/lock.hpp): acquire, release, and the takeover from a dead owner.
 *
 * Modelled: the named semaphore (a counter), the record lock on byte LOCK (a process owns it, and the kernel drops it
 * when the process ends), the mutex that one process's threads acquire first, and every interleaving of THREADS threads
 * that each take the lock ROUNDS times. With SIBLINGS the threads 0 and 1 are one process: F_SETLK then succeeds for
 * both, as in the kernel.
 *
 * Abstracted, besides what README.md says: a slice after which set_record_lock fails changes nothing unless the
 * deadline has passed, so it is left out. Any thread that wants the lock may get it first.
 *
 * Checked, too: the semaphore stays between 0 and THREADS; whatever the dead have left in it, all others get through.
 * If nobody died, a permit is left for the next process. With -DNO_SLICES (no deaths, no stops) permits alone bring
 * everyone through: a slice is needed only after a death.
 *
 * Unless a case says otherwise: THREADS=3 ROUNDS=2
 */
#ifdef SIBLINGS
#define PROCESSES (THREADS - 1)
#define process_of(t) ((t) - ((t) > 0))
#define finished(p) (ended[(p) + 1] && ((p) > 0 || ended[0]))
#else
#define PROCESSES THREADS
#define process_of(t) (t)
#define finished(p) ended[p]
#endif
#define FATE_MAY_HOLD_BACK
#define ACTOR my

#include "processes.pml"

byte semaphore = 1;                 /* a hint and a queue */
byte record_lock = NOBODY;          /* the truth: the process that holds byte LOCK */
bool mutex_held[PROCESSES];         /* in the process's own memory, so it dies with the process */
bool owns[THREADS];                 /* acquire has returned to this thread as owner */
bool ended[THREADS];

#define number_of_owners (owns[0] + owns[1] + (THREADS > 2 -> owns[THREADS - 1] : 0))

inline kernel_drops_locks(p) {
  if :: record_lock == p -> record_lock = NOBODY :: else fi;
#ifdef SIBLINGS
  if :: p == 0 -> owns[0] = false :: else fi;
  owns[p + 1] = false
#else
  owns[p] = false
#endif
}

#include "fate.pml"

inline now_owner() {
  owns[me] = true;
  assert(number_of_owners == 1)
}

#define lock_is_mine_to_take (record_lock == NOBODY || record_lock == my || on(BROKEN_PERMIT_ALONE))

inline set_record_lock() {
  record_lock = my; now_owner()
}

inline queue_with_threads() {
  atomic { runs(my) && (on(BROKEN_NO_MUTEX) || !mutex_held[my]) -> mutex_held[my] = true }
}

/* Returns as owner, or not: the deadline has passed, or a signal handler has raised. */
inline acquire() {
  do
  :: queue_with_threads();
     if                                                       /* sem_trywait, wait_for_permit */
     :: atomic { runs(my) && semaphore > 0 -> semaphore-- };
        if
        :: atomic { runs(my) && lock_is_mine_to_take -> set_record_lock() }; break
        :: atomic { runs(my) && !lock_is_mine_to_take -> mutex_held[my] = false }   /* the permit is dropped */
        fi
#if !defined(NO_SLICES) && !defined(BROKEN_ONLY_PERMITS)
     :: atomic { runs(my) && lock_is_mine_to_take -> set_record_lock() }; break   /* a slice is over */
#endif
     :: atomic { runs(my) && !lock_is_mine_to_take -> mutex_held[my] = false }; break  /* the last slice */
     fi;
     if
     :: step(skip)
     :: step(skip); break                                     /* it gives up */
     fi
  od
}

inline release() {
  step(owns[me] = false);
#ifdef BROKEN_POST_FIRST
  atomic { runs(my) -> none_left = (semaphore == 0) };
  if :: none_left -> step(semaphore++) :: else fi;
  atomic { runs(my) -> none_left = false; record_lock = NOBODY };
#else
  step(record_lock = NOBODY);                                 /* F_UNLCK */
  atomic { runs(my) -> none_left = (semaphore == 0) };            /* sem_getvalue */
  if :: none_left -> atomic { runs(my) -> semaphore++; none_left = false; assert(semaphore <= THREADS) } :: else fi;
#endif
  unless(BROKEN_NO_MUTEX, step(mutex_held[my] = false))
}

proctype thread(byte me; byte my) {
  byte round;
  bool none_left;

  do
  :: round < ROUNDS ->
     acquire();
     when(owns[me], release());                               /* commit.pml has the work under the lock */
     step(round++; ended[me] = (round == ROUNDS))
  :: else -> break
  od
}

init {
  byte t;
  atomic {
    for (t : 0 .. THREADS - 1) { run thread(t, process_of(t)) }
    t = 0
  }
}

#define through(t) (ended[t] || dead[process_of(t)] || stopped == process_of(t))
#define everyone_is_through (through(0) && through(1) && through(THREADS - 1))
#define owner_is_stopped (stopped != NOBODY && record_lock == stopped)

/* No process can make a step: every living one is through, and if nobody died, a permit is left for the next. */
active proctype quiescence() {
  atomic {
    timeout ->
    assert(everyone_is_through || owner_is_stopped);
    assert(DEATHS || STOPS || semaphore >= 1)
  }
}
