/* Tables of parameters, read without a lock (native/parameters/table.hpp, table_reader.hpp).
 *
 * Modelled: two chiefs that make TURNS updates between them. Each update adds an id, removes one, or both, on any free
 * slot or a new one, with the index as it is or a new one. A reader looks up one id, READS times.
 *
 * Abstracted, besides what README.md says: the undo log is complete before the journal's stamp. An index is a stamp
 * and, for each id, the slots that its entries lead to. Updates of a row alone are left out: they change no stamp.
 *
 * Unless a case says otherwise: TURNS=3 READS=1
 */
#define PROCESSES 3
#define READER 2
#define SLOTS 3
#define NONE 9

#define ACTOR p
#include "processes.pml"

/* Slots. A stamp is twice the generation that gave or freed the slot, plus 1 if freed; 0: never given. */
byte id[SLOTS] = NONE;
byte stamp[SLOTS];
byte word[6] = NONE;      /* two a slot */

/* For each of two places: the stamp of the index there, and for each id a bit for each slot. */
byte built[2];
byte entries[4];          /* 2 * place + id */

/* Committed together, by one store. */
byte generation = 1;
byte rows = 1;
byte place = 0;
byte index_stamp = 1;
bit there[2];             /* the books: the ids in the table, and their slots */
byte slot_of[2];

byte owner = NOBODY;
byte journal = 0;
byte saved_stamp[SLOTS];
byte saved_id[SLOTS];
byte turns = TURNS;

/* What the reader may find and must find. */
byte wanted = NONE;
bit must, may, adding[2], removing[2];
bool through[PROCESSES];

#define in_use(s) (stamp[s] > 0 && stamp[s] % 2 == 0 && stamp[s] / 2 <= generation)
#define has_id(s) ((there[0] && slot_of[0] == (s)) || (there[1] && slot_of[1] == (s)))
#define is_free(s) !(on(BROKEN_STAMP_LATE) -> has_id(s) : in_use(s))
#define kernel_drops_locks(p) dropped_by(p, owner)
#define finished(p) through[p]
#include "fate.pml"

inline settled() {
  adding[0] = 0; adding[1] = 0; removing[0] = 0; removing[1] = 0
}

/* With the lock; each store is a step. */
inline put_back() {
  i = 0;
  do
  :: atomic { runs(p) && i < rows ->
       only(BROKEN_BELOW_ROWS, if :: saved_stamp[i] % 2 == 0 -> stamp[i] = saved_stamp[i] :: else fi)
       unless(BROKEN_BELOW_ROWS, id[i] = saved_id[i])
     };
     atomic { runs(p) ->
       unless(BROKEN_BELOW_ROWS, stamp[i] = saved_stamp[i];)
       i++ }
  :: atomic { runs(p) && i >= rows -> i = 0; break }
  od;
  atomic { runs(p) -> generation++; settled() }
}

/* Chooses the slot that the new id gets. */
inline next_free() {
  if
  only(BROKEN_GIVES_FREED, :: removes != NONE -> slot = gone)
  :: rows > 0 && is_free(0) -> slot = 0
  :: rows > 1 && is_free(1) -> slot = 1
  :: rows > 2 && is_free(2) -> slot = 2
  :: rows < SLOTS && !(rows > 0 && is_free(0)) && !(rows > 1 && is_free(1)) -> slot = rows
  fi
}

#define gives_it_away (adds != NONE && slot == gone)
proctype chief(byte p) {
  byte i = 0;
  byte adds = NONE;
  byte removes = NONE;
  byte slot, gone;
  bit grows;

  do
  :: atomic { runs(p) && turns > 0 && owner == NOBODY -> owner = p; turns-- };
     when(journal == generation + 1, put_back());
     atomic { runs(p) ->                                                      /* prepare: all ways */
       adds = NONE; removes = NONE; grows = 0;
       if
       :: !there[0] -> adds = 0
       :: !there[1] -> adds = 1
       :: there[0] || there[1]
       fi;
       if
       :: there[0] -> removes = 0
       :: there[1] -> removes = 1
       :: adds != NONE
       fi;
       if :: adds != NONE -> grows = 1 :: true fi;
       if :: removes != NONE -> gone = slot_of[removes] :: else -> gone = 0 fi;
       if :: adds != NONE -> next_free() :: else fi;
       i = 0;
       do
       :: i < SLOTS -> saved_id[i] = id[i]; saved_stamp[i] = stamp[i]; i++
       :: else -> i = 0; break
       od };
     atomic { runs(p) -> journal = generation + 1;                              /* begin */
       if :: adds != NONE -> adding[adds] = 1; if :: wanted == adds -> may = 1 :: else fi :: else fi;
       if :: removes != NONE -> removing[removes] = 1; if :: wanted == removes -> must = 0 :: else fi :: else fi };
     if
     :: atomic { runs(p) && adds != NONE -> skip };
        unless(BROKEN_STAMP_LATE, atomic { runs(p) -> stamp[slot] = 2 * (generation + 1) };)  /* give */
        atomic { runs(p) -> word[2 * slot] = adds };
        atomic { runs(p) -> word[2 * slot + 1] = adds };
        only(BROKEN_STAMP_LATE, atomic { runs(p) -> stamp[slot] = 2 * (generation + 1) };)
        atomic { runs(p) -> id[slot] = adds };                                  /* name */
        if
        :: atomic { runs(p) && grows -> built[1 - place] = generation + 1; entries[2 * (1 - place)] = 0;
             entries[2 * (1 - place) + 1] = 0; i = 0 };
           do                                                                   /* build_index */
           :: atomic { runs(p) && i < SLOTS ->
                if
                :: (i < rows && in_use(i) && !(removes != NONE && i == gone)) || i == slot ->
                     entries[2 * (1 - place) + id[i]] = entries[2 * (1 - place) + id[i]] | (1 << i)
                :: else fi;
                i++ }
           :: atomic { runs(p) && i == SLOTS -> i = 0; break }
           od
        :: atomic { runs(p) && !grows -> entries[2 * place + adds] = entries[2 * place + adds] | (1 << slot) }
        fi
     :: atomic { runs(p) && adds == NONE -> skip }
     fi;
     if
     :: atomic { runs(p) && removes != NONE ->
          if :: !gives_it_away && !on(BROKEN_STAMP_LATE) -> stamp[gone] = 2 * (generation + 1) + 1 :: else fi }
     :: atomic { runs(p) && removes == NONE -> skip }
     fi;
     atomic { runs(p) ->                                                      /* commit */
       if :: adds != NONE -> there[adds] = 1; slot_of[adds] = slot; if :: slot >= rows -> rows = slot + 1 :: else fi :: else fi;
       if :: removes != NONE -> there[removes] = 0 :: else fi;
       if :: grows -> place = 1 - place; index_stamp = generation + 1 :: else fi;
       generation++;
       settled() };
     atomic { runs(p) -> owner = NOBODY; adds = NONE; removes = NONE; slot = 0; gone = 0; grows = 0 }
  :: atomic { runs(p) && turns == 0 -> through[p] = true; break }
  od
}

#define is_as_before (id[slot] == wanted && (stamp[slot] == before || on(BROKEN_ID_ALONE)))
#define index_has_changed (only(BROKEN_PLACE, place != at_place) unless(BROKEN_PLACE, index_stamp != at_stamp))
proctype reader() {
  byte reads = READS;
  byte at_generation, at_rows, at_place, at_stamp;
  byte found;            /* bits of slots that are left to look at */
  byte slot, before;
  byte first = NONE, second = NONE;

  do
  :: atomic { runs(READER) && reads > 0 -> reads--;
       if :: wanted = 0 :: wanted = 1 fi;
       must = there[wanted] && !removing[wanted];
       may = there[wanted] || adding[wanted] };
look:
     atomic { runs(READER) -> at_generation = generation; at_rows = rows; at_place = place; at_stamp = index_stamp };
     atomic { runs(READER) ->                                                   /* find_each */
       found = (built[at_place] == at_stamp -> entries[2 * at_place + wanted] : 0) };
     do
     :: atomic { runs(READER) && found > 0 ->
          slot = (found % 2 == 1 -> 0 : ((found / 2) % 2 == 1 -> 1 : 2));
          found = found & ~(1 << slot) };
        if
        :: atomic { runs(READER) && slot >= at_rows && !on(BROKEN_ROWS) -> goto next }
        :: atomic { runs(READER) && (slot < at_rows || on(BROKEN_ROWS)) -> skip }
        fi;
        if
        :: atomic { runs(READER) && id[slot] != wanted -> goto next }
        :: atomic { runs(READER) && id[slot] == wanted -> before = stamp[slot] }
        fi;
        if
        :: atomic { runs(READER) && !(before > 0 && before % 2 == 0 && before / 2 <= at_generation) -> goto next }
        :: atomic { runs(READER) && before > 0 && before % 2 == 0 && before / 2 <= at_generation ->
             first = word[2 * slot] }
        fi;
        atomic { runs(READER) -> second = word[2 * slot + 1] };
        if
        :: atomic { runs(READER) && is_as_before -> assert(may && first == wanted && second == wanted); goto done }
        :: atomic { runs(READER) && !is_as_before -> goto look }
        fi;
next:   skip
     :: atomic { runs(READER) && found == 0 -> break }
     od;
     if
     :: atomic { runs(READER) && index_has_changed -> goto look }
     :: atomic { runs(READER) && !index_has_changed -> assert(!must) }
     fi;
done:
     atomic { runs(READER) -> wanted = NONE; must = 0; may = 0; slot = 0; before = 0; first = NONE; second = NONE;
       found = 0 }
  :: atomic { runs(READER) && reads == 0 -> through[READER] = true; break }
  od
}

init {
  atomic {
    id[0] = 0; stamp[0] = 2; word[0] = 0; word[1] = 0;
    built[0] = 1; entries[0] = 1; there[0] = 1;
    run chief(0);
    run chief(1);
    run reader()
  }
}

/* At the end every living process is through, and none has the lock. */
active proctype quiescence() {
  atomic {
    timeout ->
    assert(STOPS || owner == NOBODY);
    assert(STOPS || ((dead[0] || through[0]) && (dead[1] || through[1]) && (dead[READER] || through[READER])))
  }
}
