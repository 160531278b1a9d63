/* Opening against creating, unlinking and cleaning (_segment/opening.py, native/segment/opening.hpp).
 *
 * Modelled: one name in /dev/shm. A file (inode) exists while it has the name or is open. Each file has a
 * mark UNLINKED in its header, a semaphore, presence bytes and a lock byte for the name; the kernel unlocks these
 * bytes when the process that locked them ends or closes the file. The semaphore has its own name, which contains the
 * file's token, and a flock that says "being made" and ends with its holder. USERS processes open or create, TURNS
 * times; then each closes, perhaps after an unlink or a clean, or stays. The other processes clean TURNS times. stat
 * and unlink by path are two steps, as in the kernel: another file may get the name in between. In the end an observer
 * that never dies cleans up and checks what is left.
 *   FORKS     process 1 is a child that process 0 may fork while it is attached: it has the file open and, until its
 *             first operation, no presence
 *   STRANGER  process 1 is another user: neither user can make or remove the other's files; cleaners are root
 *   FAILS     a process that attaches may give up in the middle (a signal handler raises, no place is free)
 *   REOPENS   an attached process may open the name again
 *   LOSES     somebody else removes a semaphore
 *   FORCES    a cleaner may remove a segment in use, without attaching
 *
 * Abstracted, besides what README.md says: the lock byte for the name is free or not; in the code a process waits two
 * seconds for it and then has an error (FAILS), here it waits. Any semaphore will do, since it is a hint (lock.pml). A
 * process attaches once at a time; the GIL keeps its threads out of what is one step here. A file's number is its
 * token: it is not used again while anything leads to it, nor while a cleaner has it in its list.
 *
 * Checked, in more detail: a process that removes the name removes it from the file it means. clean removes no file
 * that a living process is attached to, itself included, and no semaphore of a file that has the name or is being
 * made. Every living process gets through, unless the holder of the lock byte for the name is stopped.
 *
 * Unless a case says otherwise: USERS=2 TURNS=1 FILES=5
 */
#define PROCESSES 3
#define OBSERVER PROCESSES
#define CHILD 1
#define finished(p) (ended[p] && !attached[p])

#define FATE_MAY_HOLD_BACK
#include "processes.pml"

byte name;                          /* the file that has the name; 0: none */
bool unlinked[FILES];               /* in the header */
bool semaphore[FILES];              /* sem.NAME.token stands in /dev/shm */
byte being_made[FILES] = NOBODY;    /* the process that has its flock; a semaphore made again has no flock */
byte name_lock_holder[FILES] = NOBODY;
byte file[PROCESSES + 1];           /* the file that the process has open */
bool presence[PROCESSES + 1];       /* it holds a presence byte of that file */

bool forked, reopened;              /* the child exists; an attached process has opened once more */

bool attached[PROCESSES + 1];       /* the books: it considers itself attached */
bool given_up[FILES];               /*            explicitly unlinked */
bool ended[PROCESSES + 1];
bool making[PROCESSES + 1];         /*            on the way from the semaphore's name to the segment's */
byte listed[PROCESSES + 1];         /*            a cleaner's list of semaphores, a bit for each */
#ifdef STRANGER
bool belongs_to_stranger[FILES];
#define is_stranger(p) ((p) == CHILD)
#define is_root(p) ((p) >= USERS)
#define may_remove(f) (is_root(me) || is_stranger(me) == belongs_to_stranger[f])
#else
#define may_remove(f) true
#endif

inline close_file(p) {
  if :: name_lock_holder[file[p]] == p -> name_lock_holder[file[p]] = NOBODY :: else fi;
  if :: being_made[file[p]] == p -> being_made[file[p]] = NOBODY :: else fi;
  attached[p] = false;
  presence[p] = false;
  making[p] = false;
  file[p] = 0
}

inline kernel_drops_locks(p) { close_file(p); listed[p] = 0 }

#include "fate.pml"

#define mine file[me]
#define remove_semaphore(f) semaphore[f] = false; being_made[f] = NOBODY

#define shares(p) (p != me && presence[p] && file[p] == mine)
#define somebody_else_is_present (shares(0) || shares(1) || shares(2) || shares(3))
#define lives_elsewhere(p) (p != me && attached[p] && file[p] != mine && !given_up[file[p]])
#define lives_here(p) (attached[p] && file[p] == mine && !given_up[mine])
#define assert_nobody_lives_here assert(!(lives_here(0) || lives_here(1) || lives_here(2)))
#define has_it_open(p) (p != me && file[p] == mine)
#define has_it_listed(p) (listed[p] & (1 << mine))
#define is_in_use \
  (name == mine || semaphore[mine] || has_it_open(0) || has_it_open(1) || has_it_open(2) \
   || has_it_listed(0) || has_it_listed(1) || has_it_listed(2))

inline now_attached() {
  attached[me] = true;
  assert(given_up[mine] || name == mine);
  assert(given_up[mine] || !(lives_elsewhere(0) || lives_elsewhere(1) || lives_elsewhere(2)))
}

inline lock_name() {
  atomic { runs(me) && name_lock_holder[mine] == NOBODY -> name_lock_holder[mine] = me }
}

inline unlock_name() {
  step(name_lock_holder[mine] = NOBODY)
}

/* Removes the name, if it is this file's, and the semaphore. Needs the file's name lock. */
inline remove_names() {
  when(name == mine, step(assert(name == mine || name == 0); name = 0));
  step(remove_semaphore(mine))
}

inline claim() {
  step(presence[me] = true)
}

#define must_make_semaphore (!semaphore[mine] && may_remove(mine))
/* Opens or makes the semaphore; the caller need not know which. If somebody removes it meanwhile, it is made once more
 * (up to eight times in the code), and then the process does without. */
inline open_semaphore() {
  when(must_make_semaphore,
    step(semaphore[mine] = true);
    when(!semaphore[mine], step(semaphore[mine] = true)))
}

/* The second look: does this file still have the name? */
inline look_again() {
  if
  :: atomic { runs(me) && !unlinked[mine] && name == mine -> now_attached() }
#ifdef BROKEN_NO_FINISH
  :: atomic { runs(me) && unlinked[mine] && name == mine -> skip }
#else
  :: atomic { runs(me) && unlinked[mine] && name == mine && may_remove(mine) -> skip }; remove_names()
  :: atomic { runs(me) && unlinked[mine] && name == mine && !may_remove(mine) -> failed = !on(BROKEN_STRANGER) }
#endif
  :: atomic { runs(me) && name != mine && may_remove(mine) -> remove_semaphore(mine) }
  :: atomic { runs(me) && name != mine && !may_remove(mine) -> skip }
  fi
}

inline leave_no_semaphore() {
  when(name != mine && may_remove(mine) && !on(BROKEN_FAILS), step(remove_semaphore(mine)))
}

/* Opens the semaphore, claims a presence, looks a second time. */
inline enter() {
  unless(BROKEN_ORPHAN, open_semaphore();)
  claim();
  if
  only(FAILS, :: step(failed = true); leave_no_semaphore())
  :: step(skip);
#ifdef BROKEN_LOOK_FREE
     if
     :: atomic { runs(me) && !unlinked[mine] && name == mine -> skip }; step(now_attached())
     :: atomic { runs(me) && (unlinked[mine] || name != mine) -> skip };
        lock_name(); look_again(); unlock_name()
     fi
#else
     lock_name(); look_again(); unlock_name()
#endif
  fi;
  only(BROKEN_ORPHAN, when(attached[me], open_semaphore()))
}

/* Leaves the process attached, or with no file open (not found, or failed). */
inline attach() {
  do
  :: atomic { runs(me) && name == 0 -> skip }; break
  :: atomic { runs(me) && name != 0 -> mine = name };        /* open */
     enter();
     if
     :: atomic { runs(me) && attached[me] -> skip }; break
     :: atomic { runs(me) && !attached[me] && failed -> close_file(me) }; break
     :: atomic { runs(me) && !attached[me] && !failed -> close_file(me) }
     fi
  od
}

/* A process that made the file could not attach: it removes the file unless somebody else is attached. */
inline take_back_new() {
#ifdef BROKEN_TAKE_BACK
  when(name == mine, step(assert_nobody_lives_here; name = 0));
  step(remove_semaphore(mine))
#else
  lock_name();
  if
  :: atomic { runs(me) && (somebody_else_is_present || name != mine) -> skip }
  :: atomic { runs(me) && !(somebody_else_is_present || name != mine) -> assert_nobody_lives_here };
     remove_names()
  fi;
  unlock_name()
#endif
}

/* Builds the whole file, then names the semaphore, while its flock says "being made", and then the
 * segment, unless the name is taken (EEXIST). Before that nobody else can have the file open. Afterwards
 * the maker attaches like everybody else. */
inline create_segment() {
  atomic {                                                   /* O_TMPFILE, twice; flock; linkat */
    runs(me) ->
    mine = 1;
    do
    :: is_in_use -> mine++; assert(mine < FILES)
    :: else -> break
    od;
    unlinked[mine] = false; given_up[mine] = false;
    only(STRANGER, belongs_to_stranger[mine] = is_stranger(me);)
    unless(BROKEN_FLOCK_LATE, being_made[mine] = me;)
    semaphore[mine] = true; making[me] = true
  };
  only(BROKEN_FLOCK_LATE, step(being_made[mine] = me);)
  if
  :: atomic { runs(me) && name == 0 -> name = mine; making[me] = false };  /* linkat */
     step(being_made[mine] = (being_made[mine] == me -> NOBODY : being_made[mine]));
     if
     :: atomic { runs(me) && name == mine -> skip };         /* open_by_name */
        enter();
        if
        :: atomic { runs(me) && failed -> presence[me] = false }; take_back_new()   /* its handle is closed */
        :: atomic { runs(me) && !failed -> skip }
        fi
     :: atomic { runs(me) && name != mine -> skip };
        step(remove_semaphore(mine))
     fi
  :: atomic { runs(me) && name != 0 -> making[me] = false };
     step(remove_semaphore(mine))
  fi;
  step(if :: !attached[me] -> close_file(me) :: else fi)
}

inline open_or_create() {
  do
  :: attach();
     when(attached[me] || failed, break);
     create_segment();
     when(attached[me] || failed, break)
  od
}

/* An attached process opens one more handle; only the semaphore may have to be made. */
inline open_again() {
  if
  :: atomic { runs(me) && name == mine -> skip };            /* open */
     when(must_make_semaphore, step(semaphore[mine] = true));
     lock_name(); look_again(); unlock_name()
  :: atomic { runs(me) && name != mine -> skip }             /* another file, or none */
  fi
}

inline unlink() {
  unless(BROKEN_UNLINK_RACE, lock_name();)
  step(unlinked[mine] = true; given_up[mine] = true);
  remove_names();
  unless(BROKEN_UNLINK_RACE, unlock_name())
}

#define in_use (somebody_else_is_present || (presence[me] && !on(BROKEN_OWN_PRESENCE)))

/* Removes the names of the open file unless a process is attached to it. */
inline unlink_unused() {
  lock_name();
  if
  :: atomic { runs(me) && (in_use || name != mine) -> skip }
  :: atomic { runs(me) && !(in_use || name != mine) -> skip };
     only(BROKEN_CLEAN_MARKS, step(unlinked[mine] = true);)
     step(assert_nobody_lives_here);
     remove_names()
  fi;
  unlock_name()
}

inline clean_segment() {
  if
  :: atomic { runs(me) && name != 0 -> mine = name };
     unlink_unused();
     step(close_file(me))
#ifdef FORCES
  :: atomic { runs(me) && name != 0 && me != OBSERVER -> mine = name };
     unlink();
     step(close_file(me))
#endif
  :: atomic { runs(me) && name == 0 -> skip }
  fi
}

/* Lists the semaphores that exist. */
inline leftovers() {
  atomic {
    runs(me) ->
    f = 1;
    do
    :: f < FILES -> listed[me] = listed[me] | (semaphore[f] << f); f++
    :: else -> f = 1; break
    od
  }
}
#define is_listed (f < FILES && (listed[me] & (1 << f)))
#define done_with(f) listed[me] = listed[me] & ~(1 << f)

#define is_made_by(p) (making[p] && file[p] == f)
inline remove_orphan() {
  step(assert(name != f && !(is_made_by(0) || is_made_by(1) || is_made_by(2))); remove_semaphore(f))
}

#define is_being_made(f) (semaphore[f] && being_made[f] != NOBODY)
/* _semaphore_is_orphaned: is it being made? If not, does a segment with this token have the name? */
inline clean_semaphore() {
  only(BROKEN_ASKED_LATE, when(name != f, when(!is_being_made(f), remove_orphan())))
  unless(BROKEN_ASKED_LATE, when(!is_being_made(f), when(name != f, remove_orphan())))
}

inline clean() {
  leftovers();
  do
  :: atomic { runs(me) && is_listed -> skip };
     clean_semaphore();
     step(done_with(f); f++)
  :: atomic { runs(me) && f < FILES && !is_listed -> f++ }
  :: atomic { runs(me) && f == FILES -> f = 0 }; break
  od;
  clean_segment()
}

/* What an attached process does; the caller closes the file. */
inline use() {
  do
  only(REOPENS, :: atomic { runs(me) && !reopened -> reopened = true }; open_again())
#ifdef FORKS
  :: atomic { runs(me) && !forked && me != CHILD ->
       forked = true; ended[CHILD] = false; file[CHILD] = mine
     }
#endif
  :: step(skip); break
  :: atomic { runs(me) && may_remove(mine) -> skip }; unlink(); break
  :: atomic { runs(me) && may_remove(mine) -> skip }; unlink_unused(); break
  :: atomic { runs(me) -> stays = true }; break
  od
}

proctype user(byte me) {
  byte turns;
  bool failed, stays;

  do
  :: turns < TURNS ->
     open_or_create();
     when(attached[me], use());                               /* else: an error */
     if
     :: atomic { runs(me) && stays -> ended[me] = true }; break
     :: atomic { runs(me) && !stays ->
          close_file(me); turns++; failed = false; ended[me] = (turns == TURNS)
        }
     fi
  :: else -> break
  od
}

#ifdef FORKS
/* Forked while its parent was attached. */
inline attach_child() {
  claim();
#ifdef BROKEN_CHILD
  step(now_attached())
#else
  lock_name();
  if
  :: atomic { runs(me) && name != mine && !unlinked[mine] -> failed = true }     /* removed as unused */
  :: atomic { runs(me) && !(name != mine && !unlinked[mine]) -> now_attached() }
  fi;
  unlock_name()
#endif
}

proctype child(byte me) {
  bool failed, stays;

  atomic { runs(me) && forked -> skip };
  if
  :: step(skip)                                              /* never uses the segment */
  :: step(skip); attach_child();
     when(attached[me], use())
  fi;
  step(if :: !stays -> close_file(me) :: else fi; ended[me] = true)
}
#endif

proctype cleaner(byte me) {
  byte turns, f;

  do
  :: turns < TURNS ->
     clean();
     step(turns++; ended[me] = (turns == TURNS))
  :: else -> break
  od
}

#ifdef LOSES
/* An outsider removes a semaphore, at any moment or never. */
active proctype loser() {
  if :: atomic { name != 0 && semaphore[name] -> remove_semaphore(name) } :: skip fi
}
#endif

#define lives_in(p, f) (presence[p] && file[p] == f)
#define is_orphan(f) (semaphore[f] && name != f && being_made[f] == NOBODY)
#define no_orphans (!is_orphan(1) && !is_orphan(2) && !is_orphan(3) && !is_orphan(4))

#define who_is_stopped_holds_the_name \
  (stopped != NOBODY && name_lock_holder[file[stopped]] == stopped)
#define something_befell (dead[0] || dead[1] || dead[2] || stopped != NOBODY)

active proctype observer() {
  byte me = OBSERVER;
  byte f;

  atomic {
    timeout ->
    assert((is_through(0) && is_through(1) && is_through(2)) || who_is_stopped_holds_the_name);
    assert(something_befell || no_orphans)
  };
  clean();
  assert(no_orphans);
  assert(name == 0 || lives_in(0, name) || lives_in(1, name) || lives_in(2, name))
}

init {
  byte p;
  atomic {
    for (p : 0 .. PROCESSES - 1) {
      if
      only(FORKS, :: p == CHILD -> ended[p] = true; run child(p))
      :: p != CHILD && p < USERS -> run user(p)
      unless(FORKS, :: p == CHILD && p < USERS -> run user(p))
      :: p >= USERS -> run cleaner(p)
      fi
    }
    p = 0
  }
}
