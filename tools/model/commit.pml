/* The commit (native/commit.hpp, rows.hpp, buffer.hpp): begin, save, publish, add, commit, undo, and what a
 * take sees of them.
 *
 * Modelled: WORKERS processes that each do OPERATIONS things under the lock, every choice explored: apply a
 * gradient that touches any non-empty set of ROWS rows; apply one that gives up half-way (a sum that would
 * overflow, or no space: roll_back); take everything. The state kept twice with the generation that says
 * which copy counts; the undo log, with as much room as the committed state says; slots in order of first
 * touch; the index from row to slot with its round stamp, in which undone applies leave entries behind, and
 * the count of the entries in use. Rows in consecutive slots are saved and changed in runs of up to RUN. A
 * row is two words (left, right) that are added one after the other, and a contribution count: a row can be
 * torn. With -DDENSE: the two buffers instead. Every store into shared memory is a step of its own, except
 * where a comment says why not; the death of the owner between any two of them lets the next one in, who
 * undoes and may die in that as well, and so on; at the end an observer who does not die looks at what is
 * left. With -DREADER one process reads the state without the lock.
 *
 * Abstracted: the lock is one word with its owner, dropped at death (lock.pml shows that it is one). A
 * gradient is a digit in base 4: the n-th of a round adds 4^n to each word that it touches, so that what is
 * lost, doubled or torn shows in the sum. A bucket of the index has one place, and all rows the same home.
 * Growth of the index is left out: the grown index is built beside and becomes current with the state, as
 * everything else in it; so are the round's shape (kept twice, like the dense buffers), the pages given back
 * after a commit, and operations that change nothing but the state (set_step, advance_step, unseal, drop):
 * each is one commit, such as `reserve` has it. Arithmetic that does not fit, and stamps and generations that
 * wrap, are the code's own matter. At each acquire, after undo, `poison` overwrites all that nobody may read
 * any more (slots not in use, the undo log, the other copy of the state) and renumbers the generations: worse
 * than what the dead really leave there, and what differs only in such leavings becomes one state. So does
 * what differs only in how far index_filled is above the entries that are there. With -DNO_POISON all stays
 * as it was left.
 *
 * Checked at every acquire, by the next owner after undo: rows, contributions and count are those of exactly
 * the gradients that were committed and not taken (no gradient torn, lost or doubled); a take hands out
 * exactly these; an apply that returned True was committed and one that raised was not; index_filled counts
 * every occupied place, those that the dead left too; a lock-free reader sees one commit's state or knows
 * that it did not.
 *
 * Broken on purpose (each must be found):
 *   BROKEN_COMMIT_FIRST the commit word is written before the rows
 *   BROKEN_SAVE_ORDER   `publish` counts the rows before they are saved
 *   BROKEN_BEGIN_ORDER  the journal becomes valid before it is emptied of the last operation's rows
 *   BROKEN_UNDO_ORDER   undo commits before the rows are back: a second death tears
 *   BROKEN_UNDO_ROOM    a longer undo log becomes known only with the commit of the apply that needs it
 *   BROKEN_INDEX_TRUST  an index entry is believed without asking the slot
 *   BROKEN_NEW_ROWS     undo does not count the entries that are left in the index: it runs full
 */
#ifndef WORKERS
#define WORKERS 2
#endif
#ifndef OPERATIONS
#define OPERATIONS 2
#endif
#ifndef RUN
#define RUN 1
#endif
#define ROWS 2
#define BUCKETS (ROWS * WORKERS * OPERATIONS)   /* enough for all that may be left behind: no rebuild */

#define PROCESSES WORKERS
#define finished(p) ended[p]
#define OBSERVER PROCESSES

#include "processes.pml"

/* ---- the segment ---- */
typedef StateCopy {
  byte count;       /* gradients in this round */
  byte rows;        /* slots in use */
  byte index_stamp; /* buckets with another stamp are empty */
  byte index_filled; /* entries in use, those of undone applies included */
  byte undo_room;   /* reserved for the undo log: rows that the undo log has room for */
  bit buffer        /* dense: which buffer holds the sum */
}
typedef Undo { byte slot; byte contributions; short left; short right }
typedef Slot { byte row; byte contributions; short left; short right }
typedef Bucket { byte stamp; byte tag; byte slot }  /* tag: the row + 1; 0: free */
typedef Buffer { short left; short right }

StateCopy state[2];
byte generation = 1;
byte journal_records;
byte journal_new_rows;
byte journal_generation;
#ifdef DENSE
Buffer buffer[2];
#else
Undo undo_log[ROWS];
Slot slot[ROWS];
Bucket bucket[BUCKETS];
#endif
byte record_lock = NOBODY;

#define ABSENT ROWS
#define current state[generation & 1]
#define next state[(generation + 1) & 1]
#define cut_short (journal_generation == generation + 1)

/* ---- the owner's own memory: there is one owner, so one copy will do; lost with it ---- */
byte new_count, new_rows, new_index_stamp, new_index_filled, new_undo_room;
bit new_buffer;
byte found[ROWS];                   /* the slot of each row, or ABSENT */
byte row, at, length, records;
byte rows_touched;                  /* the gradient; none: it is a take */
short weight;
bool gives_up, committed;

inline forget() {
  new_count = 0; new_rows = 0; new_index_stamp = 0; new_index_filled = 0; new_undo_room = 0;
  new_buffer = 0; found[0] = 0; found[1] = 0; row = 0; at = 0; length = 0; records = 0;
  rows_touched = 0; weight = 0; gives_up = false; committed = false
}

/* ---- the books, kept outside: what the segment ought to say ---- */
short here_sum[ROWS];
byte here_contributions[ROWS];
byte here_count;
#ifdef READER
byte count_at[2], rows_at[2];       /* what was committed as which generation, by its parity */
#endif
bool ended[PROCESSES + 1];

inline kernel_drops_locks(p) {
  if :: record_lock == p -> record_lock = NOBODY; forget() :: else fi
}

#include "fate.pml"

#define step(action) atomic { runs(me) -> action }

/* What the books do in the instant of a commit. */
#define ROUND_GOES_ON 0
#define GRADIENT_ADDED 1
#define ROUND_TAKEN 2
inline book(event) {
  at = 0;
  do
  :: at < ROWS ->
     if
     :: event == GRADIENT_ADDED && (rows_touched & (1 << at)) ->
        here_sum[at] = here_sum[at] + weight; here_contributions[at]++
     :: event == ROUND_TAKEN -> here_sum[at] = 0; here_contributions[at] = 0
     :: else
     fi;
     at++
  :: else -> break
  od;
  at = 0;
  if
  :: event == GRADIENT_ADDED -> here_count++; committed = true
  :: event == ROUND_TAKEN -> here_count = 0
  :: else
  fi
}

#define is_filled(b, stamp_now) (bucket[b].stamp == stamp_now && bucket[b].tag != 0)

inline count_entries() {            /* into `row` */
  row = 0;
  at = 0;
  do
  :: at < BUCKETS -> row = row + is_filled(at, current.index_stamp); at++
  :: else -> break
  od;
  at = 0
}

/* The segment says what the books say. Rows that were touched stand in one slot each. */
inline check_visible() {
  d_step {
    assert(current.count == here_count);
#ifdef DENSE
    assert(here_count == 0 || (buffer[current.buffer].left == here_sum[0]
                               && buffer[current.buffer].right == here_sum[0]));
#else
    at = 0;
    row = 0;
    do
    :: at < current.rows ->
       assert(slot[at].left == here_sum[slot[at].row]);
       assert(slot[at].right == here_sum[slot[at].row]);
       assert(slot[at].contributions == here_contributions[slot[at].row]);
       assert(!(row & (1 << slot[at].row)));
       row = row | (1 << slot[at].row);
       at++
    :: else -> break
    od;
    at = 0;
    do
    :: at < ROWS -> assert((here_contributions[at] > 0) == ((row >> at) & 1)); at++
    :: else -> break
    od;
    count_entries();
    assert(row <= current.index_filled);
#endif
    at = 0;
    row = 0
  }
}

#define GARBAGE 99
#ifdef NO_POISON
inline poison() { skip }
#else
inline poison() {
  d_step {
    next.count = GARBAGE; next.rows = GARBAGE; next.index_stamp = GARBAGE;
    next.index_filled = GARBAGE; next.undo_room = GARBAGE; next.buffer = 0;
#ifdef DENSE
    buffer[1 - current.buffer].left = GARBAGE; buffer[1 - current.buffer].right = GARBAGE;
#else
    at = 0;
    do
    :: at < ROWS ->
       undo_log[at].slot = 0; undo_log[at].contributions = GARBAGE;
       undo_log[at].left = GARBAGE; undo_log[at].right = GARBAGE;
       if
       :: at >= current.rows ->
          slot[at].row = 0; slot[at].contributions = GARBAGE;
          slot[at].left = GARBAGE; slot[at].right = GARBAGE
       :: else
       fi;
       at++
    :: else -> break
    od;
    count_entries();
    current.index_filled = row;
    row = 0;
    do
    :: at < BUCKETS ->
       if
       :: is_filled(at, current.index_stamp) -> bucket[at].stamp = 1
       :: else -> bucket[at].stamp = 0; bucket[at].tag = GARBAGE; bucket[at].slot = 0
       fi;
       at++
    :: else -> break
    od;
    at = 0;
#endif
    current.index_stamp = 1;
#ifndef READER
    generation = 2 + (generation & 1);
    journal_generation = generation  /* the last that is not ahead: the one most easily mistaken */
#endif
  }
}
#endif

/* ---- commit.hpp ---- */
inline write_state(copy) {
  step(copy.count = new_count);
  step(copy.rows = new_rows);
  step(copy.index_stamp = new_index_stamp);
  step(copy.index_filled = new_index_filled);
  step(copy.undo_room = new_undo_room);
  step(copy.buffer = new_buffer)
}

inline store_generation(event) {
  atomic {
    runs(me) ->
    generation++;                   /* THE commit */
#ifdef READER
    count_at[generation & 1] = new_count;
    rows_at[generation & 1] = new_rows;
#endif
    book(event)
  }
}

inline commit(event) {
#ifdef BROKEN_COMMIT_FIRST
  if
  :: event != GRADIENT_ADDED -> store_generation(event)
  :: else                           /* apply has written it already */
  fi;
  write_state(current)
#else
  write_state(next);
  store_generation(event)
#endif
}

inline begin(fresh) {
#ifdef BROKEN_BEGIN_ORDER
  step(journal_generation = generation + 1);
  step(journal_records = 0);
  step(journal_new_rows = fresh)
#else
  step(journal_records = 0);
  step(journal_new_rows = fresh);
  step(journal_generation = generation + 1)
#endif
}

inline read_current() {             /* Committed::current */
  new_count = current.count; new_rows = current.rows;
  new_index_stamp = current.index_stamp; new_index_filled = current.index_filled;
  new_undo_room = current.undo_room; new_buffer = current.buffer
}

inline put_back() {
#ifndef DENSE
  do
  :: atomic { runs(me) && at < journal_records -> assert(journal_records <= current.undo_room) };
     step(slot[undo_log[at].slot].contributions = undo_log[at].contributions);
     step(slot[undo_log[at].slot].left = undo_log[at].left);
     step(slot[undo_log[at].slot].right = undo_log[at].right; at++)
  :: atomic { runs(me) && at >= journal_records -> at = 0 }; break
  od
#else
  skip
#endif
}

/* Its commit, and nothing else, is what makes the journal void: generation is journal_generation then. */
inline undo() {
#ifdef BROKEN_UNDO_ORDER
  commit(ROUND_GOES_ON);
  put_back()
#else
  put_back();
#ifndef BROKEN_NEW_ROWS
  step(new_index_filled = new_index_filled + journal_new_rows);
#endif
  commit(ROUND_GOES_ON)             /* recoveries + 1 */
#endif
}

/* ---- open_segment.hpp: Session ---- */
inline Session() {
  atomic { runs(me) && record_lock == NOBODY -> record_lock = me };
  if
  :: atomic { runs(me) && cut_short -> read_current() }; undo()
  :: atomic { runs(me) && !cut_short -> skip }
  fi;
  atomic { runs(me) -> check_visible(); poison(); read_current() }
}

inline release() {
  step(forget(); record_lock = NOBODY; ended[me] = (operations == OPERATIONS))
}

inline roll_back() {
  if
  :: atomic { runs(me) && cut_short -> read_current() }; undo()
  :: atomic { runs(me) && !cut_short -> skip }
  fi;
  atomic { runs(me) -> check_visible() }
}

#ifndef DENSE

/* ---- index.hpp ---- */

#define place_is_free(b) (!is_filled(b, new_index_stamp))
/* An entry is believed only about a slot that is in use and says itself that it is this row's: undone
 * applies leave entries behind, and the slots that they meant are given out again. */
#ifdef BROKEN_INDEX_TRUST
#define leads_to_row(b) (bucket[b].tag == row + 1)
#else
#define leads_to_row(b) (bucket[b].tag == row + 1 && bucket[b].slot < new_rows \
                         && slot[bucket[b].slot].row == row)
#endif

/* For all rows of the gradient, before anything is changed; the first free place ends a search. Reads
 * only: one step. */
inline find() {
  atomic {
    runs(me) ->
    row = 0;
    do
    :: row < ROWS ->
       at = 0;
       do
       :: at < BUCKETS && !place_is_free(at) && !leads_to_row(at) -> at++
       :: at < BUCKETS && !place_is_free(at) && leads_to_row(at) -> found[row] = bucket[at].slot; break
       :: at == BUCKETS || place_is_free(at) -> found[row] = ABSENT; break
       od;
       row++
    :: row == ROWS -> break
    od;
    at = 0; row = 0
  }
}

inline insert() {
  atomic {
    runs(me) ->
    do
    :: !place_is_free(at) -> at++; assert(at < BUCKETS)
    :: place_is_free(at) -> break
    od
  };
  if
  :: atomic { runs(me) && bucket[at].stamp != new_index_stamp -> bucket[at].tag = 0 };
     step(bucket[at].stamp = new_index_stamp)
  :: atomic { runs(me) && bucket[at].stamp == new_index_stamp -> skip }
  fi;
  step(bucket[at].slot = new_rows);
  step(bucket[at].tag = row + 1; at = 0)
}

/* ---- rows.hpp ---- */
#define touches(r) ((rows_touched >> (r)) & 1)
#define to_be_added(r) (touches(r) && found[r] != ABSENT)
#define is_fresh(r) (touches(r) && found[r] == ABSENT)
#define fresh_rows (is_fresh(0) + is_fresh(1))
#if RUN > 1
#define run_of_two (row == 0 && to_be_added(0) && to_be_added(1) && found[1] == found[0] + 1)
#else
#define run_of_two false
#endif

/* A longer log is committed on its own: whoever undoes must know how long it may be. */
inline reserve() {
  if
  :: atomic { runs(me) && to_be_added(0) + to_be_added(1) > new_undo_room ->
       new_undo_room = to_be_added(0) + to_be_added(1) };
#ifndef BROKEN_UNDO_ROOM
     commit(ROUND_GOES_ON)
#endif
  :: atomic { runs(me) && to_be_added(0) + to_be_added(1) <= new_undo_room -> skip }
  fi
}

/* Several stores in a step: nobody looks at an undo record before `publish` counts it. (A run is one record
 * in the code, and as many here as it has rows, published at once.) */
inline save(r) {
  step(undo_log[records].slot = found[r];
       undo_log[records].contributions = slot[found[r]].contributions;
       undo_log[records].left = slot[found[r]].left;
       undo_log[records].right = slot[found[r]].right;
       records++)
}

inline publish(count_of_records) {
  step(journal_records = count_of_records)
}

inline add_piece(r) {
  step(slot[found[r]].contributions++);
  step(slot[found[r]].left = slot[found[r]].left + weight);
  step(slot[found[r]].right = slot[found[r]].right + weight)
}

inline append() {
  step(slot[new_rows].row = row);
  step(slot[new_rows].contributions = 1);
  step(slot[new_rows].left = weight);       /* copy_numbers */
  step(slot[new_rows].right = weight);
  insert();
  step(new_rows++; row++)
}

inline add_rows() {
  do
  :: atomic { runs(me) && row < ROWS && !touches(row) -> row++ }
  :: atomic { runs(me) && row < ROWS && is_fresh(row) -> skip };
     append()
  :: atomic { runs(me) && row < ROWS && to_be_added(row) -> length = 1 + run_of_two };
#ifdef BROKEN_SAVE_ORDER
     publish(records + length);
#endif
     save(row);
#if RUN > 1
     if
     :: atomic { runs(me) && length == 2 -> skip }; save(row + 1)
     :: atomic { runs(me) && length == 1 -> skip }
     fi;
#endif
#ifndef BROKEN_SAVE_ORDER
     publish(records);
#endif
     add_piece(row);
#if RUN > 1
     if
     :: atomic { runs(me) && length == 2 -> skip }; add_piece(row + 1)
     :: atomic { runs(me) && length == 1 -> skip }
     fi;
#endif
     step(row = row + length; length = 0);
     if
     :: atomic { runs(me) && gives_up -> row = ROWS }         /* sum_overflows */
     :: step(skip)
     fi
  :: atomic { runs(me) && row == ROWS -> row = 0; records = 0 }; break
  od
}

inline add_gradient() {
  find();
  reserve();
  if
  :: atomic { runs(me) && gives_up -> skip }                  /* no space */
  :: begin(fresh_rows);
#ifdef BROKEN_COMMIT_FIRST
     store_generation(GRADIENT_ADDED);
#endif
     add_rows();
     step(new_index_filled = new_index_filled + fresh_rows)
  fi
}

#else

/* ---- buffer.hpp ---- */
inline add_gradient() {
  begin(0);
#ifdef BROKEN_COMMIT_FIRST
  store_generation(GRADIENT_ADDED);
#endif
  if
  :: atomic { runs(me) && new_count == 0 -> new_buffer = 1 - new_buffer };
     step(buffer[new_buffer].left = weight);
     step(buffer[new_buffer].right = weight)
  :: atomic { runs(me) && new_count > 0 -> new_buffer = 1 - new_buffer };
     step(buffer[new_buffer].left = buffer[1 - new_buffer].left + weight);
     step(buffer[new_buffer].right = buffer[1 - new_buffer].right + weight)
  fi
}

#endif

/* ---- operations.hpp ---- */
inline apply() {
  add_gradient();
  if
  :: atomic { runs(me) && !gives_up -> new_count++ };
     commit(GRADIENT_ADDED)
  :: atomic { runs(me) && gives_up -> skip };
     roll_back()
  fi;
  step(assert(committed == !gives_up));  /* True, or the exception, is what the caller gets */
  release()
}

inline collect() {
  if
  :: atomic { runs(me) && new_count == 0 -> skip }
  :: atomic { runs(me) && new_count > 0 -> skip };
#ifdef DENSE
     step(assert(buffer[current.buffer].left == here_sum[0]));
     step(assert(buffer[current.buffer].right == here_sum[0]));
#else
     do
     :: atomic { runs(me) && at < current.rows -> assert(slot[at].left == here_sum[slot[at].row]) };
        step(assert(slot[at].right == here_sum[slot[at].row]); at++)
     :: atomic { runs(me) && at == current.rows -> at = 0 }; break
     od;
#endif
     begin(0);
     step(new_count = 0; new_rows = 0; new_index_stamp++; new_index_filled = 0);  /* end_round */
     commit(ROUND_TAKEN)
  fi;
  release()
}

/* Without the lock: the generation before and after the rest. */
inline glimpse() {
  step(seen_generation = generation);
  step(seen_count = state[seen_generation & 1].count);
  step(seen_rows = state[seen_generation & 1].rows);
  step(assert(seen_generation != generation
              || (seen_count == count_at[seen_generation & 1]
                  && seen_rows == rows_at[seen_generation & 1])))
}

/* What the owner of the lock is to do: chosen late, so that who waits for the lock is in one state only. */
inline choose_operation() {
  atomic {
    runs(me) ->
    operations++;
    weight = 1 << (2 * new_count);
    if
    :: rows_touched = 1
#ifndef DENSE
    :: rows_touched = 2
    :: rows_touched = 3
#ifndef BROKEN_COMMIT_FIRST
    :: rows_touched = 3; gives_up = true
#endif
#endif
    :: rows_touched = 0; weight = 0
    fi
  }
}

proctype worker(byte me) {
  byte operations;

  do
  :: operations < OPERATIONS ->
     Session();
     choose_operation();
     if
     :: atomic { runs(me) && rows_touched > 0 -> skip }; apply()
     :: atomic { runs(me) && rows_touched == 0 -> skip }; collect()
     fi
  :: else -> break
  od
}

#ifdef READER
proctype reader(byte me) {
  byte operations, seen_generation, seen_count, seen_rows;

  do
  :: operations < OPERATIONS ->
     glimpse();
     step(seen_generation = 0; seen_count = 0; seen_rows = 0;
          operations++; ended[me] = (operations == OPERATIONS))
  :: else -> break
  od
}
#endif

/* Comes when nothing else moves, and does not die: the fresh process that must see all or nothing. */
active proctype observer() {
  byte me = OBSERVER;
  byte operations;

  timeout;
  Session();
  release()
}

init {
  byte p;
  atomic {
    current.index_stamp = 1;        /* 0: never used */
    for (p : 0 .. WORKERS - 1) {
#ifdef READER
      if :: p == WORKERS - 1 -> run reader(p) :: else -> run worker(p) fi
#else
      run worker(p)
#endif
    }
    p = 0
  }
}
