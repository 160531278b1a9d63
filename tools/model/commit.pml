/* The commit of a lane, that of the round over all lanes (native/protocol/commit.hpp, lane.hpp), and what a take sees.
 *
 * Modelled: WORKERS processes do OPERATIONS operations each, with every choice explored. An apply holds the lock of one
 * of LANES lanes. Its gradient touches any non-empty set of rows (each of MEMBERS members has ROWS). It may give up
 * half-way (roll_back: a sum would overflow, or there is no space). A take holds the locks of all lanes and takes
 * everything. The round's record and each lane's have two copies, and a generation that says which one is current.
 * Members' copies have stamps, and are written between `begin` and the commit. Contents belong to a round's number,
 * and are void once the round has moved on. Each lane has an undo log, with as much room as its committed record says.
 * Slots are given out in order of first touch. The index leads from row to slot and has a stamp. Undone applies leave
 * entries in the index: index_filled counts the entries in use, leftovers those left behind. Rows in consecutive slots
 * are saved and changed in runs of up to RUN. A row is a contribution count and two words (left, right) that change
 * one after the other, so it can be torn. With -DDENSE each member has two buffers instead. Every store into shared
 * memory is a step, except where a comment says why not. If the owner dies between two steps, the next owner recovers,
 * and may die in the recovery. With -DREADER one process reads a lane's records without its lock.
 *
 * Abstracted, besides what README.md says: the n-th gradient of a lane's round adds 4^n to each word that it touches.
 * A bucket of the index has one place, and all rows of a member have the same home. Left out are: a grown index (it is
 * built beside the old one and becomes current with the member's copy); the round's shape (it has two copies, like the
 * dense buffers); pages given back after a commit; operations that change only a record (advance_step, set_step,
 * unseal, drop: each is one commit, as in `reserve_undo` or a take). At each acquire, after recovery, `poison`
 * overwrites all that nobody may read any more, and renumbers generations and stamps so that they do not wrap. So spin
 * merges states that differ only there, or in how far index_filled and leftovers exceed the entries that exist. With
 * -DNO_POISON nothing is overwritten.
 *
 * Checked, too: an apply that returned True was committed, and one that raised was not. The books (taken) balance. No
 * index has more entries than index_filled and leftovers say. A reader sees one commit's records, or notices that not.
 *
 * Unless a case says otherwise: WORKERS=2 OPERATIONS=2 LANES=1 MEMBERS=1 ROWS=2 RUN=1
 */
#define ITEMS (MEMBERS * ROWS)      /* of a lane, 1 or 2; item m * ROWS + r is row r of member m */
#define BUCKETS (ROWS * WORKERS * OPERATIONS)   /* of a member: room for all entries left behind, so no rebuild */

#define PROCESSES WORKERS
#define finished(p) ended[p]
#define OBSERVER PROCESSES

#include "processes.pml"

/* ---- the segment ---- */
typedef RoundCopy { byte round; byte taken }
typedef LaneCopy {
  byte round;       /* the round that count belongs to */
  byte count;       /* gradients */
  byte undo_room;   /* rows for which the undo log has reserved room */
  byte leftovers    /* index entries that undone applies may have left behind */
}
typedef MemberCopy {
  byte stamp;       /* the lane's generation that wrote it */
  byte round;       /* the round that the next two belong to */
  byte count;       /* gradients that contained this member */
  byte rows;        /* slots in use */
  byte index_stamp; /* buckets with another stamp are empty */
  byte index_filled; /* index entries in use, without those left behind */
  bit buffer        /* dense: which buffer holds the sum */
}
typedef Undo { byte slot; byte contributions; short left; short right }
typedef Slot { byte row; byte contributions; short left; short right }
typedef Bucket { byte stamp; byte tag; byte slot }  /* tag: the row + 1; 0: free */
typedef Buffer { short left; short right }

/* The owner's private memory, lost with the owner. A lane has one owner, so one copy for each lane is enough. */
typedef Operation {
  byte round_now;                   /* RoundState::round, as read under the lock */
  byte round, count, undo_room, leftovers;
  byte touched;                     /* the gradient's items, a bit each; 0: a take */
  byte found[ITEMS];                /* the slot of each item, or ABSENT */
  short weight;
  byte item, at, length, records;
  bool gives_up, committed
}
typedef Change { byte copy; byte round; byte count; byte rows; byte index_stamp; byte index_filled; bit buffer }

typedef Lane {
  byte lock = NOBODY;
  byte generation = 1;
  LaneCopy state[2];
  MemberCopy member[MEMBERS * 2];
  byte journal_records;
  byte journal_new_rows;
  byte journal_generation;
#ifdef DENSE
  Buffer buffer[MEMBERS * 2];
#else
  Undo undo_log[ITEMS];
  Slot slot[ITEMS];
  Bucket bucket[MEMBERS * BUCKETS];
#endif
  Operation now;
  Change change[MEMBERS];           /* to be committed */
  /* the books, outside the segment: what the lane should contain */
  short here_sum[ITEMS];
  byte here_contributions[ITEMS];
  byte here_count;
#ifdef READER
  byte count_at[2];                 /* the committed count, by the parity of its generation */
  byte member_count_at[MEMBERS * 2]
#endif
}
Lane lane[LANES];
RoundCopy round[2];
byte round_generation = 1;
byte here_taken;                    /* the books */
bool ended[PROCESSES + 1];

/* Used within a d_step only. */
hidden byte i, j, k, seen;

/* In this file a process works in lane l. */
#define L lane[l]
#define NOW L.now
#define ABSENT ROWS
#define current L.state[L.generation & 1]
#define next L.state[(L.generation + 1) & 1]
#define current_round round[round_generation & 1]
#define next_round round[(round_generation + 1) & 1]
#define interrupted (L.journal_generation == L.generation + 1)

#define member_copy(m, c) L.member[(m) * 2 + (c)]
#define stamp(m, c) member_copy(m, c).stamp
#define is_ahead(s) ((s) > L.generation || ((s) == L.generation && (s) > 0 && on(BROKEN_STAMP_BELOW)))
#define current_copy(m) \
  (is_ahead(stamp(m, 1)) -> 0 : (is_ahead(stamp(m, 0)) || stamp(m, 1) > stamp(m, 0)))

#define member_of(at_item) ((at_item) / ROWS)
#define touches(at_item) ((NOW.touched >> (at_item)) & 1)
#define changes(m) ((NOW.touched >> ((m) * ROWS)) & ((1 << ROWS) - 1))

inline forget(x) {
  lane[x].now.round_now = 0; lane[x].now.round = 0; lane[x].now.count = 0; lane[x].now.undo_room = 0;
  lane[x].now.leftovers = 0; lane[x].now.touched = 0; lane[x].now.weight = 0; lane[x].now.item = 0;
  lane[x].now.at = 0; lane[x].now.length = 0; lane[x].now.records = 0;
  lane[x].now.gives_up = false; lane[x].now.committed = false;
  for (i : 0 .. ITEMS - 1) { lane[x].now.found[i] = 0 }
  for (i : 0 .. MEMBERS - 1) {
    lane[x].change[i].copy = 0; lane[x].change[i].round = 0; lane[x].change[i].count = 0;
    lane[x].change[i].rows = 0; lane[x].change[i].index_stamp = 0; lane[x].change[i].index_filled = 0;
    lane[x].change[i].buffer = 0
  }
}

inline kernel_drops_locks(p) {
  d_step {
    for (k : 0 .. LANES - 1) {
      if :: lane[k].lock == p -> lane[k].lock = NOBODY; forget(k) :: else fi
    }
    k = 0
  }
}

#include "fate.pml"

/* Updates the books in the instant of a lane's commit. */
#define NOTHING_NEW 0
#define GRADIENT_ADDED 1
inline book(event) {
  if
  :: event == GRADIENT_ADDED ->
     for (i : 0 .. ITEMS - 1) {
       if :: touches(i) -> L.here_sum[i] = L.here_sum[i] + NOW.weight; L.here_contributions[i]++ :: else fi
     }
     L.here_count++;
     NOW.committed = true
  :: else fi
#ifdef READER
  ;
  L.count_at[L.generation & 1] = current.count;
  for (i : 0 .. MEMBERS - 1) {
    L.member_count_at[i * 2 + (L.generation & 1)] = member_copy(i, current_copy(i)).count
  }
#endif
}

inline book_taken() {
  for (j : 0 .. LANES - 1) {
    here_taken = here_taken + lane[j].here_count;
    lane[j].here_count = 0;
    for (i : 0 .. ITEMS - 1) { lane[j].here_sum[i] = 0; lane[j].here_contributions[i] = 0 }
  }
}

#define bucket_of(m, b) L.bucket[(m) * BUCKETS + (b)]
#define is_filled(m, b, stamp_now) (bucket_of(m, b).stamp == stamp_now && bucket_of(m, b).tag != 0)

/* Counts into `seen` the index entries of member m that have the stamp. */
inline count_entries(m, stamp_now) {
  seen = 0;
  for (j : 0 .. BUCKETS - 1) { seen = seen + is_filled(m, j, stamp_now) }
}

#define the(m) member_copy(m, current_copy(m))
#define is_void(m) (the(m).round != current_round.round)
#define slot_of(m, s) L.slot[(m) * ROWS + (s)]

/* The lane agrees with the books in all members. Each touched row has exactly one slot. */
inline check_visible() {
  d_step {
    assert((current.round == current_round.round -> current.count : 0) == L.here_count);
    for (i : 0 .. MEMBERS - 1) {
#ifdef DENSE
      assert((is_void(i) -> 0 : the(i).count) == L.here_contributions[i]);
      assert(L.here_contributions[i] == 0 || (L.buffer[i * 2 + the(i).buffer].left == L.here_sum[i]
                                              && L.buffer[i * 2 + the(i).buffer].right == L.here_sum[i]));
#else
      seen = 0;
      if
      :: !is_void(i) ->
         for (j : 0 .. ROWS - 1) {
           if
           :: j < the(i).rows ->
              assert(slot_of(i, j).row < ROWS);
              assert(slot_of(i, j).left == L.here_sum[i * ROWS + slot_of(i, j).row]);
              assert(slot_of(i, j).right == L.here_sum[i * ROWS + slot_of(i, j).row]);
              assert(slot_of(i, j).contributions == L.here_contributions[i * ROWS + slot_of(i, j).row]);
              assert(!(seen & (1 << slot_of(i, j).row)));
              seen = seen | (1 << slot_of(i, j).row)
           :: else fi
         }
      :: else fi;
      for (j : 0 .. ROWS - 1) {
        assert((L.here_contributions[i * ROWS + j] > 0) == ((seen >> j) & 1))
      }
      count_entries(i, the(i).index_stamp + is_void(i));
      assert(seen <= current.leftovers + (is_void(i) -> 0 : the(i).index_filled))
#endif
    }
    i = 0
  }
}

#define GARBAGE 99
#define not_current(m) member_copy(m, 1 - current_copy(m))
#ifdef NO_POISON
inline poison() { skip }
inline poison_round() { skip }
#else
inline poison() {
  d_step {
    next.round = GARBAGE; next.count = GARBAGE; next.undo_room = GARBAGE; next.leftovers = GARBAGE;
    current.leftovers = 0;
    unless(READER, if :: current.round != current_round.round -> current.count = GARBAGE :: else fi;)
    for (i : 0 .. MEMBERS - 1) {
      unless(READER, not_current(i).stamp = 0;)
      not_current(i).round = GARBAGE; not_current(i).count = GARBAGE; not_current(i).rows = GARBAGE;
      not_current(i).index_stamp = GARBAGE; not_current(i).index_filled = GARBAGE;
      not_current(i).buffer = 0;
#ifdef DENSE
      L.buffer[i * 2 + 1 - the(i).buffer].left = GARBAGE; L.buffer[i * 2 + 1 - the(i).buffer].right = GARBAGE;
#else
      for (j : 0 .. ROWS - 1) {
        L.undo_log[i * ROWS + j].slot = 0; L.undo_log[i * ROWS + j].contributions = GARBAGE;
        L.undo_log[i * ROWS + j].left = GARBAGE; L.undo_log[i * ROWS + j].right = GARBAGE;
        if
        :: is_void(i) || j >= the(i).rows ->
           slot_of(i, j).row = 0; slot_of(i, j).contributions = GARBAGE;
           slot_of(i, j).left = GARBAGE; slot_of(i, j).right = GARBAGE
        :: else fi
      }
      if
      :: is_void(i) ->
         count_entries(i, the(i).index_stamp + 1);
         current.leftovers = (seen > current.leftovers -> seen : current.leftovers);
         the(i).index_filled = GARBAGE; the(i).rows = GARBAGE
      :: else ->
         count_entries(i, the(i).index_stamp);
         the(i).index_filled = seen
      fi;
      for (j : 0 .. BUCKETS - 1) {
        if
        :: is_filled(i, j, the(i).index_stamp + is_void(i)) -> bucket_of(i, j).stamp = 1 + is_void(i)
        :: else -> bucket_of(i, j).stamp = 0; bucket_of(i, j).tag = GARBAGE; bucket_of(i, j).slot = 0
        fi
      }
      the(i).index_stamp = 1;
#endif
      unless(READER, if :: is_void(i) -> the(i).count = GARBAGE :: else fi;)
      j = 0
    }
    i = 0;
#ifndef READER
    for (i : 0 .. MEMBERS - 1) {    /* the copy stays current: the other's stamp is less, or both are 0 */
      if :: the(i).stamp > 0 -> the(i).stamp = 1 :: else fi
    }
    L.generation = 2 + (L.generation & 1);
    L.journal_generation = L.generation; /* the highest that is not `interrupted` */
#endif
    j = 0
  }
}

/* With all locks. */
inline poison_round() {
  d_step {
    next_round.round = GARBAGE; next_round.taken = GARBAGE;
    for (j : 0 .. LANES - 1) {
      lane[j].state[lane[j].generation & 1].round =
        1 + (lane[j].state[lane[j].generation & 1].round == current_round.round);
      for (i : 0 .. 2 * MEMBERS - 1) {
        lane[j].member[i].round = 1 + (lane[j].member[i].round == current_round.round)
      }
    }
    current_round.round = 2;
    current_round.taken = 0;
    here_taken = 0
  }
}
#endif

/* ---- commit.hpp ---- */
inline read_current() {             /* Committed::current */
  NOW.round_now = current_round.round;
  NOW.round = current.round; NOW.count = current.count;
  NOW.undo_room = current.undo_room; NOW.leftovers = current.leftovers
}

inline write_record(copy) {
  step(copy.round = NOW.round);
  step(copy.count = NOW.count);
  step(copy.undo_room = NOW.undo_room);
  step(copy.leftovers = NOW.leftovers)
}

inline store_generation(event) {
  atomic {
    runs(me) ->
    d_step {
      L.generation++;               /* THE commit */
      book(event);
      i = 0
    }
  }
}

/* ---- lane.hpp: Member ---- */
#define NEW_STAMP (L.generation + !on(BROKEN_COMMIT_FIRST))  /* that variant has stored it already */
#define written(m) member_copy(m, (on(BROKEN_OVER_CURRENT) -> L.change[m].copy : 1 - L.change[m].copy))
inline write(m) {
  if
  :: atomic { runs(me) && changes(m) -> written(m).stamp = NEW_STAMP };
     step(written(m).round = L.change[m].round);
     step(written(m).count = L.change[m].count);
#ifdef DENSE
     step(written(m).buffer = L.change[m].buffer)
#else
     step(written(m).rows = L.change[m].rows);
     step(written(m).index_stamp = L.change[m].index_stamp);
     step(written(m).index_filled = L.change[m].index_filled)
#endif
  :: atomic { runs(me) && !changes(m) -> skip }
  fi
}

/* Copies the committed records to private memory, so it is no step. A record of an earlier round starts anew. */
#define starts_anew(m) (L.change[m].round != NOW.round_now && !on(BROKEN_OLD_ROUND))
inline begin_round() {
  if :: NOW.round != NOW.round_now -> NOW.round = NOW.round_now; NOW.count = 0 :: else fi;
  for (i : 0 .. MEMBERS - 1) {
    if
    :: changes(i) ->
       L.change[i].copy = current_copy(i);
       L.change[i].round = the(i).round; L.change[i].count = the(i).count; L.change[i].rows = the(i).rows;
       L.change[i].index_stamp = the(i).index_stamp; L.change[i].index_filled = the(i).index_filled;
       L.change[i].buffer = the(i).buffer;
       if
       :: starts_anew(i) ->
          L.change[i].count = 0; L.change[i].rows = 0;
          L.change[i].index_stamp++; L.change[i].index_filled = 0
       :: else fi;
       L.change[i].round = NOW.round_now
    :: else fi
  }
}

/* ---- lane.hpp: Lane ---- */
inline commit(event) {
#ifdef BROKEN_COMMIT_FIRST
  if
  :: atomic { runs(me) && event == GRADIENT_ADDED -> skip };
     write(0); write(MEMBERS - 1);
     write_record(current)
  :: atomic { runs(me) && event != GRADIENT_ADDED -> skip };
     write_record(next);
     store_generation(event)
  fi
#else
  if
  :: atomic { runs(me) && event == GRADIENT_ADDED -> skip };
     write(0);
#if MEMBERS > 1
     write(1)
#endif
  :: atomic { runs(me) && event != GRADIENT_ADDED -> skip }
  fi;
  write_record(next);
  store_generation(event)
#endif
}

inline begin(fresh) {
  only(BROKEN_BEGIN_ORDER, step(L.journal_generation = L.generation + 1);)
  step(L.journal_records = 0);
  step(L.journal_new_rows = fresh);
  unless(BROKEN_BEGIN_ORDER, step(L.journal_generation = L.generation + 1))
}

inline publish(count_of_records) {
  step(L.journal_records = count_of_records)
}

#define undo_record L.undo_log[NOW.at]
inline put_back() {
#ifndef DENSE
  do
  :: atomic { runs(me) && NOW.at < L.journal_records -> assert(L.journal_records <= current.undo_room) };
     step(L.slot[undo_record.slot].contributions = undo_record.contributions);
     step(L.slot[undo_record.slot].left = undo_record.left);
     step(L.slot[undo_record.slot].right = undo_record.right; NOW.at++)
  :: atomic { runs(me) && NOW.at >= L.journal_records -> NOW.at = 0 }; break
  od
#else
  skip
#endif
}

/* Voids the copies that the uncommitted operation wrote: a later commit must not make them valid. */
inline clear() {
#ifndef BROKEN_NOT_CLEARED
  do
  :: atomic {
       runs(me) && NOW.at < 2 * MEMBERS ->
       if :: L.member[NOW.at].stamp >= L.journal_generation -> L.member[NOW.at].stamp = 0 :: else fi;
       NOW.at++
     }
  :: atomic { runs(me) && NOW.at == 2 * MEMBERS -> NOW.at = 0 }; break
  od
#else
  skip
#endif
}

/* Only the recovery's commit makes the journal void: then generation equals journal_generation. */
inline recover() {
  unless(BROKEN_UNDO_ORDER, put_back();)
  unless(BROKEN_CLEAR_LATE, clear();)
  unless(BROKEN_NEW_ROWS, step(NOW.leftovers = NOW.leftovers + L.journal_new_rows);)
  write_record(next);
  store_generation(NOTHING_NEW);    /* recoveries + 1 */
#ifdef BROKEN_UNDO_ORDER
  put_back()
#elif defined(BROKEN_CLEAR_LATE)
  clear()
#else
  skip
#endif
}

inline recovered() {
  if
  :: atomic { runs(me) && interrupted -> read_current() }; recover()
  :: atomic { runs(me) && !interrupted -> skip }
  fi;
  atomic {
    runs(me) -> check_visible(); poison();
    assert(current_round.taken == here_taken);
#if LANES == 1
    poison_round();
#endif
    read_current()
  }
}

#ifndef DENSE

/* ---- row_index.hpp ---- */

#define m_now member_of(NOW.item)
#define row_now (NOW.item % ROWS)
#define place_is_free(m, b) (!is_filled(m, b, L.change[m].index_stamp))
/* An entry counts only if its slot is in use and has this row: undone applies leave entries behind, whose
 * slots are given out again. */
#define has_row(m, s, r) ((s) < L.change[m].rows && slot_of(m, s).row == (r))
#define leads_to_row(m, b, r) \
  (bucket_of(m, b).tag == (r) + 1 && (on(BROKEN_INDEX_TRUST) || has_row(m, bucket_of(m, b).slot, r)))

/* Finds all rows of the gradient, before anything is changed. The first free place ends a search. It only
 * reads, so it is one step. */
inline find() {
  for (i : 0 .. ITEMS - 1) {
    if
    :: touches(i) ->
       j = 0;
       do
       :: j < BUCKETS && !place_is_free(member_of(i), j) && !leads_to_row(member_of(i), j, i % ROWS) -> j++
       :: j < BUCKETS && !place_is_free(member_of(i), j) && leads_to_row(member_of(i), j, i % ROWS) ->
          NOW.found[i] = bucket_of(member_of(i), j).slot; break
       :: j == BUCKETS || place_is_free(member_of(i), j) -> NOW.found[i] = ABSENT; break
       od
    :: else fi
  }
}

inline insert() {
  atomic {
    runs(me) ->
    do
    :: !place_is_free(m_now, NOW.at) -> NOW.at++; assert(NOW.at < BUCKETS)
    :: place_is_free(m_now, NOW.at) -> break
    od
  };
  if
  :: atomic { runs(me) && bucket_of(m_now, NOW.at).stamp != L.change[m_now].index_stamp ->
       bucket_of(m_now, NOW.at).tag = 0 };
     step(bucket_of(m_now, NOW.at).stamp = L.change[m_now].index_stamp)
  :: atomic { runs(me) && bucket_of(m_now, NOW.at).stamp == L.change[m_now].index_stamp -> skip }
  fi;
  step(bucket_of(m_now, NOW.at).slot = L.change[m_now].rows);
  step(bucket_of(m_now, NOW.at).tag = row_now + 1; NOW.at = 0)
}

/* ---- sparse_sums.hpp ---- */
#define to_be_added(x) (touches(x) && NOW.found[x] != ABSENT)
#define is_fresh(x) (touches(x) && NOW.found[x] == ABSENT)
#if ITEMS == 1
#define fresh_rows is_fresh(0)
#define undo_rows to_be_added(0)
#else
#define fresh_rows (is_fresh(0) + is_fresh(1))
#define undo_rows (to_be_added(0) + to_be_added(1))
#endif
#if RUN > 1
#define run_of_two (NOW.item == 0 && to_be_added(0) && to_be_added(1) && NOW.found[1] == NOW.found[0] + 1)
#else
#define run_of_two false
#endif
#define place(x) (member_of(x) * ROWS + NOW.found[x])

/* Commits more room for the undo log, and nothing else: recovery must know how long the log may be. */
inline reserve_undo() {
  if
  :: atomic { runs(me) && undo_rows > NOW.undo_room ->
#ifdef BROKEN_UNDO_ROOM
       NOW.undo_room = undo_rows
     }
#else
       read_current();
       NOW.undo_room = undo_rows
     };
     write_record(next);
     store_generation(NOTHING_NEW);
     atomic { runs(me) -> d_step { begin_round(); i = 0 } }          /* again, from the new record */
#endif
  :: atomic { runs(me) && undo_rows <= NOW.undo_room -> skip }
  fi
}

/* Several stores in a step: nobody looks at an undo record before `publish` counts it. (In the code a run is
 * one record. Here it is one record for each row, all published at once.) */
inline save(x) {
  step(L.undo_log[NOW.records].slot = place(x);
       L.undo_log[NOW.records].contributions = L.slot[place(x)].contributions;
       L.undo_log[NOW.records].left = L.slot[place(x)].left;
       L.undo_log[NOW.records].right = L.slot[place(x)].right;
       NOW.records++)
}

inline add_piece(x) {
  step(L.slot[place(x)].contributions++);
  step(L.slot[place(x)].left = L.slot[place(x)].left + NOW.weight);
  step(L.slot[place(x)].right = L.slot[place(x)].right + NOW.weight)
}

#define new_slot slot_of(m_now, L.change[m_now].rows)
inline append() {
  step(new_slot.row = row_now);
  step(new_slot.contributions = 1);
  step(new_slot.left = NOW.weight);         /* copy_numbers */
  step(new_slot.right = NOW.weight);
  insert();
  step(L.change[m_now].rows++; L.change[m_now].index_filled++; NOW.item++)
}

inline add_rows() {
  do
  :: atomic { runs(me) && NOW.item < ITEMS && !touches(NOW.item) -> NOW.item++ }
  :: atomic { runs(me) && NOW.item < ITEMS && is_fresh(NOW.item) -> skip };
     append()
  :: atomic { runs(me) && NOW.item < ITEMS && to_be_added(NOW.item) -> NOW.length = 1 + run_of_two };
     only(BROKEN_SAVE_ORDER, publish(NOW.records + NOW.length);)
     save(NOW.item);
#if RUN > 1
     when(NOW.length == 2, save(NOW.item + 1));
#endif
     unless(BROKEN_SAVE_ORDER, publish(NOW.records);)
     add_piece(NOW.item);
#if RUN > 1
     when(NOW.length == 2, add_piece(NOW.item + 1));
#endif
     step(NOW.item = NOW.item + NOW.length; NOW.length = 0);
     if
     :: atomic { runs(me) && NOW.gives_up -> NOW.item = ITEMS }         /* sum_overflows */
     :: step(skip)
     fi
  :: atomic { runs(me) && NOW.item == ITEMS -> NOW.item = 0; NOW.records = 0 }; break
  od
}

#else

#define fresh_rows 0
inline find() { skip }
inline reserve_undo() { skip }

/* ---- dense_sums.hpp ---- */
#define m_now NOW.item
#define sum_now L.buffer[m_now * 2 + L.change[m_now].buffer]
#define other_buffer L.buffer[m_now * 2 + 1 - L.change[m_now].buffer]
inline add_rows() {
  do
  :: atomic { runs(me) && NOW.item < ITEMS && !touches(NOW.item) -> NOW.item++ }
  :: atomic { runs(me) && NOW.item < ITEMS && touches(NOW.item) ->
       other_buffer.left = (L.change[m_now].count == 0 -> 0 : sum_now.left) + NOW.weight };
     step(other_buffer.right = (L.change[m_now].count == 0 -> 0 : sum_now.right) + NOW.weight);
     step(L.change[m_now].buffer = 1 - L.change[m_now].buffer; NOW.item++);
     if
     :: atomic { runs(me) && NOW.gives_up -> NOW.item = ITEMS }         /* sum_overflows */
     :: step(skip)
     fi
  :: atomic { runs(me) && NOW.item == ITEMS -> NOW.item = 0 }; break
  od
}

#endif

/* ---- session.hpp ---- */
inline release() {
  if
  :: atomic { runs(me) && l > 0 && L.lock == me -> d_step { forget(l); L.lock = NOBODY }; l-- }
  :: atomic { runs(me) && (l == 0 || L.lock != me) -> skip }
  fi;
  atomic {
    runs(me) ->
    d_step { if :: L.lock == me -> forget(l); L.lock = NOBODY :: else fi; i = 0 };
    l = 0;
    ended[me] = (operations == OPERATIONS)
  }
}

inline roll_back() {
  if
  :: atomic { runs(me) && interrupted -> read_current() }; recover()
  :: atomic { runs(me) && !interrupted -> skip }
  fi;
  atomic { runs(me) -> check_visible() }
}

/* Called with the first lane's lock; acquires the others in order. */
inline RoundSession() {
#if LANES > 1 && !defined(BROKEN_ONE_LOCK)
  atomic { runs(me) && lane[1].lock == NOBODY -> lane[1].lock = me };
#endif
  recovered();
#if LANES > 1
  step(l = 1);
  unless(BROKEN_ONE_LOCK, recovered();)
#endif
  atomic {
    runs(me) -> skip;
    unless(BROKEN_ONE_LOCK, poison_round();)
    lane[0].now.round_now = current_round.round
  }
}

/* ---- apply.hpp, take.hpp ---- */
inline add_parts() {
  atomic {
    runs(me) ->
    d_step {
      begin_round();
      find();
      NOW.weight = 1 << (2 * NOW.count)
    }
  };
  reserve_undo();
  if
  :: atomic { runs(me) && NOW.gives_up -> skip }              /* no space */
  :: begin(fresh_rows);
     only(BROKEN_COMMIT_FIRST, store_generation(GRADIENT_ADDED);)
     add_rows()
  fi
}

inline apply() {
  add_parts();
  if
  :: atomic {
       runs(me) && !NOW.gives_up ->
       d_step {
         NOW.count++;
         for (i : 0 .. MEMBERS - 1) {
           if :: changes(i) -> L.change[i].count++ :: else fi
         }
         i = 0
       }
     };
     commit(GRADIENT_ADDED)
  :: atomic { runs(me) && NOW.gives_up -> skip };
     roll_back()
  fi;
  step(assert(NOW.committed == !NOW.gives_up))  /* the caller gets True, or the exception */
}

/* The contents were compared with the books when this process got the locks; nobody can have changed them since. */
inline consume() {
#ifdef BROKEN_ROUND_FIRST
  atomic { runs(me) -> d_step { round_generation++; book_taken(); i = 0 } };
  step(current_round.round = lane[0].now.round_now + 1);
  step(current_round.taken = here_taken)
#else
  step(next_round.round = lane[0].now.round_now + 1);
  step(next_round.taken = here_taken + lane[0].here_count + (LANES > 1 -> lane[LANES - 1].here_count : 0));
  atomic { runs(me) -> d_step { round_generation++; book_taken(); i = 0 } }     /* THE commit, of all lanes */
#endif
}

/* Reads without the lock: the generation, the rest, and the generation again. */
inline snapshot() {
  step(seen_generation = L.generation);
  step(seen_count = L.state[seen_generation & 1].count);
  step(first_stamp = stamp(MEMBERS - 1, 0));
  step(second_stamp = stamp(MEMBERS - 1, 1));
  step(copy = (second_stamp > seen_generation -> 0
               : (first_stamp > seen_generation || second_stamp > first_stamp)));
  step(seen_member = member_copy(MEMBERS - 1, copy).count);
  step(assert(seen_generation != L.generation
              || (seen_count == L.count_at[seen_generation & 1]
                  && seen_member == L.member_count_at[(MEMBERS - 1) * 2 + (seen_generation & 1)])))
}

/* Chooses the operation after the lock, so that a process that waits for the lock has one state only. A take needs the
 * first lane's lock first. */
inline choose_operation() {
  operations++;
  if
  :: NOW.touched = 1
#if ITEMS == 2
  :: NOW.touched = 2
  :: NOW.touched = 3
#endif
#if !defined(BROKEN_COMMIT_FIRST) && !(defined(DENSE) && MEMBERS == 1)
  :: NOW.touched = (1 << ITEMS) - 1; NOW.gives_up = true
#endif
  :: l == 0 -> NOW.touched = 0
  fi
}

proctype worker(byte me) {
  byte operations, l;

  do
  :: operations < OPERATIONS ->
     if
     :: atomic { runs(me) && lane[0].lock == NOBODY -> l = 0; L.lock = me; choose_operation() }
#if LANES > 1
     :: atomic { runs(me) && lane[1].lock == NOBODY -> l = 1; L.lock = me; choose_operation() }
#endif
     fi;
     if
     :: atomic { runs(me) && NOW.touched > 0 -> skip }; recovered(); apply()
     :: atomic { runs(me) && NOW.touched == 0 -> skip }; RoundSession(); consume()
     fi;
     release()
  :: else -> break
  od
}

#ifdef READER
proctype reader(byte me) {
  byte operations, l, seen_generation, seen_count, seen_member, first_stamp, second_stamp, copy;

  do
  :: operations < OPERATIONS ->
     snapshot();
     step(seen_generation = 0; seen_count = 0; seen_member = 0; first_stamp = 0; second_stamp = 0; copy = 0;
          operations++; ended[me] = (operations == OPERATIONS))
  :: else -> break
  od
}
#endif

/* Starts when no other process can make a step, and never dies. It must find each operation done wholly or not. */
active proctype observer() {
  byte me = OBSERVER;
  byte l;

  timeout;
  atomic { lane[0].lock == NOBODY -> lane[0].lock = me };
  RoundSession()
}

init {
  byte p;
  atomic {
    current_round.round = 1;
    for (p : 0 .. WORKERS - 1) {
      only(READER, if :: p == WORKERS - 1 -> run reader(p) :: else -> run worker(p) fi)
      unless(READER, run worker(p))
    }
    p = 0
  }
}
