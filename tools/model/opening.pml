/* Opening against creating, unlinking and cleaning: open_or_create, attach, publish, unlink, unlink_unused
 * (segment.py), claim (native/presence.hpp), clean (inspection/cleanup.py).
 *
 * Modelled: one name in /dev/shm; files (inodes) that live while they have the name or a descriptor; for
 * each file the mark UNLINKED in its header, the presence bytes and the lock byte for the name, both
 * dropped by the kernel when their process ends or closes; its semaphore, which has a name of its own that
 * carries the file's token. USERS processes open or create TURNS times and then, every choice explored:
 * close, unlink and close, clean while attached themselves and close, or stay; the remaining processes
 * clean TURNS times. stat and unlink by path are two steps, as they are in the kernel: what has the name
 * may change between them. In the end an observer who does not die cleans up and looks.
 *
 * Abstracted: which presence byte one gets (F_SETLK gives each to one process only, so only having one
 * matters). What is in the segment: it is complete before linkat gives it the name. The lock byte for the
 * name is taken as free or not (lock.pml; here without a semaphore in front). A process attaches once at a
 * time; its threads have a mutex and a registry. Who waits for the lock byte of the name gives up after two
 * seconds in the code, and has an error; here it waits. Names that others remove (RemoveIPC) are outside.
 *
 * Checked: never two processes attached to different files under the one name, unless one was given up by
 * an explicit unlink; who removes the name removes that of the very file it means; clean never removes a
 * file that somebody living is attached to, itself included; nothing of the dead is left after a clean,
 * and without a death there is no orphaned semaphore; every run is finite (no cycle: no livelock), and where
 * it ends everyone who lives got through, unless the one who holds the lock byte for the name is stopped.
 *
 * Broken on purpose (each must be found):
 *   BROKEN_UNMARK       clean marks UNLINKED, looks, and takes the mark back if somebody is there; attach
 *                       checks without the lock. A cleaner that dies in between robs the living.
 *   BROKEN_LOOK_FIRST   attach checks without the lock, and clean looks before it marks.
 *   BROKEN_UNLINK_RACE  the name is removed without the lock: it may be another file's by then.
 *   BROKEN_OWN_PRESENCE clean asks the kernel alone, which never reports the asker's own locks.
 *   BROKEN_ORPHAN       a semaphore is made after the last look at the mark.
 *   BROKEN_QUEUE_GONE   who finds its semaphore removed twice gives up with an error.
 *   BROKEN_NO_FINISH    who finds the mark of a dead remover does not finish the removal: no opener ever
 *                       gets out of its loop.
 */
#define PROCESSES 3
#ifndef USERS
#define USERS 2
#endif
#ifndef TURNS
#define TURNS 1
#endif
#ifndef FILES
#define FILES 5                     /* file 0: none */
#endif
#define OBSERVER PROCESSES
#define finished(p) (ended[p] && !attached[p])

#define FATE_MAY_HOLD_BACK
#include "processes.pml"

byte name;                          /* the file that has the name; 0: none */
bool unlinked[FILES];               /* in the header */
bool semaphore[FILES];              /* sem.NAME.token stands in /dev/shm */
byte name_lock_holder[FILES] = NOBODY;
byte file[PROCESSES + 1];           /* the file that the process has open */
bool presence[PROCESSES + 1];       /* it holds a presence byte of that file */

bool attached[PROCESSES + 1];       /* the books: attach has returned */
bool given_up[FILES];               /*            explicitly unlinked */
bool ended[PROCESSES + 1];

inline close_file(p) {
  if :: name_lock_holder[file[p]] == p -> name_lock_holder[file[p]] = NOBODY :: else fi;
  attached[p] = false;
  presence[p] = false;
  file[p] = 0
}

inline kernel_drops_locks(p) { close_file(p) }

#include "fate.pml"

#define step(action) atomic { runs(me) -> action }
#define mine file[me]

#define shares(p) (p != me && presence[p] && file[p] == mine)
#define somebody_else_is_present (shares(0) || shares(1) || shares(2) || shares(3))
#define lives_elsewhere(p) (p != me && attached[p] && file[p] != mine && !given_up[file[p]])
#define has_it_open(p) (p != me && file[p] == mine)
#define is_in_use (name == mine || semaphore[mine] \
                   || has_it_open(0) || has_it_open(1) || has_it_open(2))

inline now_attached() {
  attached[me] = true;
  assert(given_up[mine] || !(lives_elsewhere(0) || lives_elsewhere(1) || lives_elsewhere(2)))
}

inline lock_name() {
  atomic { runs(me) && name_lock_holder[mine] == NOBODY -> name_lock_holder[mine] = me }
}

inline unlock_name() {
  step(name_lock_holder[mine] = NOBODY)
}

/* stat, unlink, sem_unlink: under the lock byte of the file, and only of one that is marked. */
inline remove() {
  step(unlinked[mine] = true);
  if
  :: atomic { runs(me) && name == mine -> skip };            /* stat */
     step(assert(name == mine || name == 0); name = 0)       /* unlink */
  :: atomic { runs(me) && name != mine -> skip }
  fi;
  step(semaphore[mine] = false)
}

/* After publishing; by whoever finds it missing. It is only a queue and a hint. Who made it or found it may
 * find it removed when it opens it: then it makes one of its own, nameless at once. */
inline make_semaphore() {
  if
  :: atomic { runs(me) && !semaphore[mine] -> skip };
     step(semaphore[mine] = true)
  :: atomic { runs(me) && semaphore[mine] -> skip }
  fi;
  if                                                         /* use_queue */
  :: atomic { runs(me) && semaphore[mine] -> has_queue = true }
  :: atomic { runs(me) && !semaphore[mine] -> skip };
     step(semaphore[mine] = true);
     if                                                      /* use_queue */
     :: atomic { runs(me) && semaphore[mine] -> has_queue = true };
        step(semaphore[mine] = false)
#ifdef BROKEN_QUEUE_GONE
     :: atomic { runs(me) && !semaphore[mine] -> assert(false) }
#else
     :: atomic { runs(me) && !semaphore[mine] -> skip }      /* removed again: let go, start over */
#endif
     fi
  fi
}

inline claim() {
  step(presence[me] = true)
}

/* The second look. */
#if defined(BROKEN_UNMARK) || defined(BROKEN_LOOK_FIRST)
inline look_again() {
  if
  :: atomic { runs(me) && !unlinked[mine] -> skip };
     if
     :: atomic { runs(me) && name == mine -> now_attached() }
     :: atomic { runs(me) && name != mine -> skip }
     fi
  :: atomic { runs(me) && unlinked[mine] -> skip };
     lock_name();
     if
     :: atomic { runs(me) && unlinked[mine] -> skip }; remove()
     :: atomic { runs(me) && !unlinked[mine] -> skip }
     fi;
     unlock_name()
  fi
}
#else
inline look_again() {
  lock_name();
  if
  :: atomic { runs(me) && !unlinked[mine] && name == mine -> now_attached() }
#ifdef BROKEN_NO_FINISH
  :: atomic { runs(me) && !(!unlinked[mine] && name == mine) -> skip }
#else
  :: atomic { runs(me) && unlinked[mine] -> skip }; remove()
  :: atomic { runs(me) && !unlinked[mine] && name != mine -> semaphore[mine] = false }
#endif
  fi;
  unlock_name()
}
#endif

/* Queue, presence, second look. */
inline enter() {
#ifdef BROKEN_ORPHAN
  claim();
  look_again();
  if
  :: atomic { runs(me) && attached[me] -> skip }; make_semaphore()
  :: atomic { runs(me) && !attached[me] -> skip }
  fi;
#else
  make_semaphore();
  if
  :: atomic { runs(me) && has_queue -> skip }; claim(); look_again()
  :: atomic { runs(me) && !has_queue -> skip }
  fi;
#endif
  step(has_queue = false)
}

/* Ends attached, or with no file open: not found. */
inline attach() {
  do
  :: atomic { runs(me) && name == 0 -> skip }; break
  :: atomic { runs(me) && name != 0 -> mine = name };        /* open */
     enter();
     if
     :: atomic { runs(me) && attached[me] -> skip }; break
     :: atomic { runs(me) && !attached[me] -> close_file(me) }
     fi
  od
}

/* Gives a complete file the name, unless it is taken (EEXIST). Nobody is attached to it yet. */
inline publish() {
  atomic {                                                   /* O_TMPFILE, built complete */
    runs(me) ->
    mine = 1;
    do
    :: is_in_use -> mine++; assert(mine < FILES)
    :: else -> break
    od;
    unlinked[mine] = false; given_up[mine] = false
  };
  if
  :: atomic { runs(me) && name == 0 -> name = mine }         /* linkat */
  :: atomic { runs(me) && name != 0 -> skip }
  fi;
  step(close_file(me))
}

inline open_or_create() {
  do
  :: attach();
     if
     :: atomic { runs(me) && attached[me] -> skip }; break
     :: atomic { runs(me) && !attached[me] -> skip }; publish()
     fi
  od
}

inline unlink() {
#ifndef BROKEN_UNLINK_RACE
  lock_name();
#endif
  step(unlinked[mine] = true; given_up[mine] = true);
  remove();
#ifndef BROKEN_UNLINK_RACE
  unlock_name()
#endif
}

#ifdef BROKEN_OWN_PRESENCE
#define somebody_is_present somebody_else_is_present
#else
#define somebody_is_present (somebody_else_is_present || attached[me])
#endif

#define lives_here(p) (attached[p] && file[p] == mine && !given_up[mine])
#define assert_nobody_lives_here assert(!(lives_here(0) || lives_here(1) || lives_here(2)))

/* With the file open: remove its names unless somebody lives in it. */
inline unlink_unused() {
  lock_name();
#if defined(BROKEN_UNMARK)
  step(marked_by_me = !unlinked[mine]; unlinked[mine] = true);
  if
  :: atomic { runs(me) && marked_by_me && somebody_is_present -> skip };
     step(unlinked[mine] = false)
  :: atomic { runs(me) && !(marked_by_me && somebody_is_present) -> assert_nobody_lives_here };
     remove()
  fi;
  step(marked_by_me = false);
#else
  if
  :: atomic { runs(me) && (somebody_is_present || name != mine) -> skip }
  :: atomic { runs(me) && !(somebody_is_present || name != mine) -> skip };
     step(unlinked[mine] = true; assert_nobody_lives_here);
     remove()
  fi;
#endif
  unlock_name()
}

/* The semaphores that stand there; one whose file does not have the name when it is looked for afterwards is
 * orphaned: a file has its name before its semaphore is made, and never gets the name back. */
inline leftovers() {
  atomic {
    runs(me) ->
    f = 1;
    do
    :: f < FILES -> listed = listed | (semaphore[f] << f); f++
    :: else -> f = 0; break
    od
  }
}
#define semaphore_is_orphaned(f) ((listed & (1 << (f))) && name != (f))

inline clean_segment() {
  if
  :: atomic { runs(me) && name != 0 -> mine = name };
     unlink_unused();
     step(close_file(me))
  :: atomic { runs(me) && name == 0 -> skip }
  fi
}

inline clean() {
  clean_segment();
  leftovers();
  step(f = 1);
  do
  :: atomic { runs(me) && f < FILES && semaphore_is_orphaned(f) -> skip };
     step(semaphore[f] = false; f++)
  :: atomic { runs(me) && f < FILES && !semaphore_is_orphaned(f) -> f++ }
  :: atomic { runs(me) && f == FILES -> f = 0; listed = 0 }; break
  od
}

proctype user(byte me) {
  byte turns;
  bool has_queue;
#ifdef BROKEN_UNMARK
  bool marked_by_me;
#endif

  do
  :: turns < TURNS ->
     open_or_create();
     if
     :: step(skip)
     :: step(skip); unlink()
     :: step(skip); unlink_unused()
     :: atomic { runs(me) -> ended[me] = true }; break      /* stays attached */
     fi;
     atomic { runs(me) -> close_file(me); turns++; ended[me] = (turns == TURNS) }
  :: else -> break
  od
}

proctype cleaner(byte me) {
  byte turns, f, listed;
#ifdef BROKEN_UNMARK
  bool marked_by_me;
#endif

  do
  :: turns < TURNS ->
     clean();
     step(turns++; ended[me] = (turns == TURNS))
  :: else -> break
  od
}

#define lives_in(p, f) (presence[p] && file[p] == f)
#define is_orphan(f) (semaphore[f] && name != f)
#define no_orphans (!is_orphan(1) && !is_orphan(2) && !is_orphan(3) && !is_orphan(4))

#define through(p) (ended[p] || dead[p] || stopped == p)
#define who_is_stopped_holds_the_name \
  (stopped != NOBODY && name_lock_holder[file[stopped]] == stopped)

active proctype observer() {
  byte me = OBSERVER;
  byte f, listed;
#ifdef BROKEN_UNMARK
  bool marked_by_me;
#endif

  atomic {
    timeout ->
    assert((through(0) && through(1) && through(2)) || who_is_stopped_holds_the_name);
    assert(DEATHS || STOPS || no_orphans)
  };
  clean();
  assert(no_orphans);
  assert(name == 0 || lives_in(0, name) || lives_in(1, name) || lives_in(2, name))
}

init {
  byte p;
  atomic {
    for (p : 0 .. PROCESSES - 1) {
      if :: p < USERS -> run user(p) :: else -> run cleaner(p) fi
    }
    p = 0
  }
}
