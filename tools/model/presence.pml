/* The table of attached processes (native/protocol/presence.hpp): claim, leave, sweep, and `top`, the number of entries
 * that anybody needs to look at.
 *
 * Modelled: ENTRIES entries with their tokens and two record locks each, for allocation and for life, which the kernel
 * drops with their process. PROCESSES processes each do this TURNS times: a first operation (claim; if the table is
 * full, sweep and claim again), perhaps another sweep (as an operation does that finds a dead process ahead), then
 * leave or stay. A child of fork is such a process, too: it inherits nothing from its parent. With SIBLINGS process 0
 * has a second thread: record locks do not tell the two apart, and the GIL guards claim and leave, but not sweep. With
 * CROWDED all entries are dead processes' at first. Each load and store of a shared word is a step, and so is each
 * F_SETLK and F_GETLK.
 *
 * Abstracted, besides what README.md says: a process that must sweep waits for the lock, but not for a stopped owner;
 * a newcomer that has got an entry does not wait at all. In the code an entry's two bytes lie side by side, which only
 * saves time.
 *
 * Checked, in more detail: a process that has claimed is below `top`, holds both locks of its entry and has its token
 * there, until it leaves. At the end of a run a sweep lowers `top` to the last entry in use, unless a process is
 * stopped.
 *
 * Unless a case says otherwise: PROCESSES=3 TURNS=1 ENTRIES=3
 */
#ifdef SIBLINGS
#define THREADS (PROCESSES + 1)
#define process_of(t) ((t) == PROCESSES -> 0 : (t))
#else
#define THREADS PROCESSES
#define process_of(t) (t)
#endif
#define OBSERVER PROCESSES
#define NONE 255
#define GHOST 200                   /* the token of somebody long dead */
#define FATE_MAY_HOLD_BACK
#define ACTOR my

#include "processes.pml"

/* ---- the segment ---- */
byte token[ENTRIES];
byte top;

/* ---- the kernel's ---- */
byte lock_owner = NOBODY;           /* the thread that has the segment's lock */
byte presence_lock[ENTRIES] = NOBODY;
byte life_lock[ENTRIES] = NOBODY;

/* ---- each process's own ---- */
byte index[PROCESSES + 1] = NONE;   /* its entry, set during the claim */
bool claimed[PROCESSES + 1];        /* from the end of the claim on */
byte own_token[PROCESSES + 1];
byte gil[PROCESSES + 1] = NOBODY;
byte users[PROCESSES + 1];          /* operations that run */
byte claims[PROCESSES + 1];         /* how often it drew a token */

/* ---- the books ---- */
byte has[PROCESSES + 1] = NONE;     /* the entry that it has claimed and not left */
byte fallen;                        /* how many have died */
bool ended[THREADS + 1];
#define finished(p) (ended[p] only(SIBLINGS, && ((p) != 0 || ended[PROCESSES])) && has[p] == NONE)

inline kernel_drops_locks(p) {
  if :: lock_owner != NOBODY && process_of(lock_owner) == p -> lock_owner = NOBODY :: else fi;
  dropped_by(p, presence_lock[0]); dropped_by(p, life_lock[0]);
  dropped_by(p, presence_lock[1]); dropped_by(p, life_lock[1]);
  dropped_by(p, presence_lock[ENTRIES - 2]); dropped_by(p, life_lock[ENTRIES - 2]);
  dropped_by(p, presence_lock[ENTRIES - 1]); dropped_by(p, life_lock[ENTRIES - 1]);
  has[p] = NONE;
  fallen++
}

#include "fate.pml"

#define is_free(holder) (holder == NOBODY || holder == my)
#define has_place(p) (has[p] != NONE)
#define is_sound(p) \
  (!has_place(p) || (has[p] < top && token[has[p]] == own_token[p] && presence_lock[has[p]] == p \
                     && life_lock[has[p]] == p))
/* Checked after every step that could do harm: a process that has a place has all of it. */
#define check_places assert(is_sound(0) && is_sound(1) && is_sound(PROCESSES - 1) && is_sound(OBSERVER))

#define fresh_token (1 + my + 8 * (on(BROKEN_SAME_TOKEN) -> 0 : claims[my]))

inline raise_top() {
  step(top = (top > e -> top : e + 1))                       /* first_use: compare and exchange, until top > e */
}

/* Leaves the process with an entry, or e == ENTRIES. Runs with the GIL. */
inline claim() {
  atomic { runs(my) && gil[my] == NOBODY -> gil[my] = me };
  if
  :: atomic { runs(my) && claimed[my] -> e = 0; gil[my] = NOBODY }
  :: atomic { runs(my) && !claimed[my] -> e = 0; met_dead = false };
     do
     :: atomic { runs(my) && e < ENTRIES && !is_free(presence_lock[e]) -> e++ }
     :: atomic { runs(my) && e < ENTRIES && is_free(presence_lock[e]) -> presence_lock[e] = my };
        unless(BROKEN_TOP_LATE, raise_top();)
        if
        :: atomic { runs(my) && token[e] != 0 -> met_dead = true };
           step(presence_lock[e] = NOBODY; e++)
        :: atomic { runs(my) && token[e] == 0 && life_lock[e] != NOBODY -> skip };
           step(presence_lock[e] = NOBODY; e++)
        :: atomic { runs(my) && token[e] == 0 && life_lock[e] == NOBODY ->
             life_lock[e] = my; claims[my]++; own_token[my] = fresh_token
           };
           unless(BROKEN_INDEX_LATE, step(index[my] = e);)
           step(token[e] = own_token[my]; has[my] = e; check_places);
           only(BROKEN_INDEX_LATE, step(index[my] = e);)
           only(BROKEN_TOP_LATE, raise_top();)
           step(claimed[my] = true; gil[my] = NOBODY);
           break
        fi
     :: atomic { runs(my) && e == ENTRIES -> gil[my] = NOBODY }; break        /* kFull */
     od
  fi
}

/* The process leaves once no operation runs and its handle is gone. Runs with the GIL. */
inline leave() {
  atomic { runs(my) && gil[my] == NOBODY -> gil[my] = me; users[my]-- };
  if
  :: atomic { runs(my) && users[my] == 0 && claimed[my] ->
       e = index[my]; index[my] = NONE; claimed[my] = false
     };
     step(token[e] = 0; has[my] = NONE);
     step(life_lock[e] = NOBODY);
     step(presence_lock[e] = NOBODY; gil[my] = NOBODY)
  :: atomic { runs(my) && !(users[my] == 0 && claimed[my]) -> gil[my] = NOBODY }
  fi
}

/* Does the process of entry e live? Its token was read as t; now the token is read again, then the life lock. */
#define is_own (e == index[my])
#define alive (life_lock[e] != NOBODY && life_lock[e] != my)

inline free_entry() {
  step(token[e] = (token[e] == t || on(BROKEN_BLIND_SWEEP) -> 0 : token[e]); check_places; e++; t = 0)
}

inline last_use() {
  step(assert(token[e] == 0); top = (top == e + 1 || on(BROKEN_PLAIN_STORE) -> e : top); check_places)
}

/* Sweeps under the segment's lock. Gives up if a stopped process has the lock; without patience, if anybody has. */
inline sweep(patient) {
  if
  :: atomic { runs(my) && lock_owner == NOBODY -> lock_owner = me };
     step(placed = (on(BROKEN_PLACED_EARLY) -> index[my] != NONE : claimed[my]));
     step(e = 0; size = top);
     do
     :: atomic { runs(my) && e < size && token[e] == 0 -> e++ }
     :: atomic { runs(my) && e < size && token[e] != 0 -> t = token[e] };
        if
        :: atomic { runs(my) && is_own && t == own_token[my] -> e++; t = 0 }
        :: atomic { runs(my) && !is_own && token[e] == t -> skip };
           if :: atomic { runs(my) && alive -> e++; t = 0 } :: atomic { runs(my) && !alive -> skip }; free_entry() fi
        :: atomic { runs(my) && (is_own && t != own_token[my] || !is_own && token[e] != t) -> skip };
           free_entry()
        fi
     :: atomic { runs(my) && e == size -> e = top; size = 0 }; break
     od;
     do
     :: atomic { runs(my) && (e == 0 || !placed) -> skip }; break
     :: atomic { runs(my) && e > 0 && placed && token[e - 1] != 0 -> skip }; break
     :: atomic { runs(my) && e > 0 && placed && token[e - 1] == 0 -> e-- };
        if
        :: atomic { runs(my) && !is_free(presence_lock[e]) -> skip }; break
        :: atomic { runs(my) && is_free(presence_lock[e]) -> presence_lock[e] = my };
           only(BROKEN_LOOK_ONCE, last_use();)
           unless(BROKEN_LOOK_ONCE, when(token[e] == 0, last_use());)
           step(presence_lock[e] = NOBODY; check_places)
        fi
     od;
     step(lock_owner = NOBODY; placed = false; e = 0)
  :: atomic { runs(my) && lock_owner != NOBODY && (!patient || process_of(lock_owner) == stopped) ->
       e = 0; unswept = true
     }
  fi
}

/* claim (handle.hpp): if the table is full, frees the entries of the dead and claims again. */
inline first_operation() {
  claim();
  if
  :: atomic { runs(my) && e < ENTRIES && !met_dead -> e = 0 }
  :: atomic { runs(my) && e < ENTRIES && met_dead -> e = 0; met_dead = false }; sweep(false)
  :: atomic { runs(my) && e == ENTRIES -> before = fallen };
     unless(BROKEN_FULL, sweep(true); claim())
  fi;
  step(refused = (e == ENTRIES);                             /* an error */
       assert(!refused || !met_dead || unswept || fallen != before);
       e = 0; met_dead = false; unswept = false; before = 0)
}

proctype attacher(byte me; byte my) {
  byte turns, e, t, size, before;
  bool met_dead, placed, unswept, refused;

  do
  :: turns < TURNS ->
     step(users[my]++);
     first_operation();
     if
     :: step(skip)
     :: atomic { runs(my) && !refused -> skip }; sweep(true)     /* a dead process is ahead */
     fi;
     if
     :: leave();
        step(e = 0; turns++; ended[me] = (turns == TURNS))
     :: atomic { runs(my) && !refused -> ended[me] = true }; break            /* stays */
     fi
  :: else -> break
  od
}

#define through(t) (ended[t] || dead[process_of(t)] || stopped == process_of(t))
#define everyone_is_through (through(0) && through(1) && through(THREADS - 2) && through(THREADS - 1))

active proctype observer() {
  byte me = THREADS, my = OBSERVER;
  byte e, t, size;
  bool met_dead, placed, unswept;

  atomic {
    timeout ->
    check_places;
    assert(everyone_is_through || (stopped != NOBODY))
  };
  if :: stopped == NOBODY -> claim(); sweep(true) :: else -> goto end fi;
  if :: claimed[OBSERVER] -> assert(top > 0 && token[top - 1] != 0) :: else fi;
end: skip
}

init {
  byte i;
  atomic {
#ifdef CROWDED
    for (i : 0 .. ENTRIES - 1) { token[i] = GHOST }
    top = ENTRIES;
#endif
    for (i : 0 .. THREADS - 1) { run attacher(i, process_of(i)) }
    i = 0
  }
}
