/* Updates of parameters in rounds (native/operations/update.hpp).
 *
 * Modelled: CHIEFS processes that each, TURNS times, open the round, then update, skip, or do neither, and leave the
 * block in order or by an exception, at any point. One worker that reads the step, then the parameters word by word,
 * then applies, GRADIENTS times. With ADVANCER one more process calls advance_step at any time. LOADERS processes load
 * a checkpoint of the run's beginning, at any time: they mark the parameters and load them, then load the accumulator,
 * then remove the mark. The parameters are two words, each with a digit for each step, so that anything torn, doubled
 * or missing shows. Every save, count, store and commit of an update is a step.
 *
 * Abstracted: locks are words with an owner, dropped at death (lock.pml). What is done under the accumulator's locks
 * is one step, and so are its commits (commit.pml, round.pml). There are no lanes: a final round is one record, under
 * all their locks. Nobody queues for a round (line.pml). A load commits the parameters in one step. What a worker
 * applies after a load is not checked: workers do not outlive a load.
 *
 * Checked: a gradient that counts was computed from the parameters as the rounds before its step left them. A
 * consumed round is in the parameters once, in both words, or was skipped, or had no update. If the lock is free and
 * nothing is stamped, the parameters hold no half of an update. Every run is finite. At its end every living process
 * has got through, unless it has nothing to take.
 */
#ifndef CHIEFS
#define CHIEFS 2
#endif
#ifndef TURNS
#define TURNS 2
#endif
#ifndef GRADIENTS
#define GRADIENTS 2
#endif
#define WORKER CHIEFS
#ifdef ADVANCER
#define PROCESSES (CHIEFS + 2)
#define HELPER (CHIEFS + 1)
#elif defined(LOADERS)
#define PROCESSES (CHIEFS + 1 + LOADERS)
#define HELPER (CHIEFS + 1)
#else
#define PROCESSES (CHIEFS + 1)
#endif
#define STEPS 3

#include "processes.pml"

/* The accumulator's record. */
byte step = 0;
byte holder = NOBODY;
byte serial = 0;
byte final = 0;          /* 0: no update, 1: one has begun, 2: it is in the parameters */
byte final_serial = 0;
bit pending = 0;         /* a gradient is there */

/* The parameters. */
byte owner = NOBODY;
byte word[2];            /* digit 3^s: how often the round of step s is in */
byte saved[2];
byte records = 0;
byte journal = 0;        /* the generation that it would commit as */
byte generation = 1;
byte pstep = 0;
byte new_step = 0;       /* valid from generation new_needs on */
byte new_needs = 0;
byte loader = NOBODY;    /* the process that has marked the parameters as being loaded */

/* The books. */
byte want = 0;           /* what the words should be at this step */
bit skipped[STEPS + 1];
byte loads = 0;
bool through[PROCESSES];

#define digit(s) ((s) == 0 -> 1 : ((s) == 1 -> 3 : 9))
#define held (holder != NOBODY && !dead[holder])
#define is_in(s) ((word[0] / digit(s)) % 3 == 1)
#ifdef BROKEN_LOAD_DEATH
#define half_loaded (loader != NOBODY && !dead[loader])
#else
#define half_loaded (loader != NOBODY)
#endif
#define kernel_drops_locks(p) if :: owner == p -> owner = NOBODY :: else fi
#define finished(p) through[p]

/* Consumes the round, and compares the parameters with what it should have done to them. */
inline consume_round() {
  if
  :: final == 2 && !skipped[step] ->
       want = want + digit(step);
       assert(half_loaded || (word[0] == want && word[1] == want))
  :: else
  fi;
#if !defined(BROKEN_ENDS) && !defined(BROKEN_ADVANCES)
  assert(final != 1);
#endif
  step++; final = 0; final_serial = 0; holder = NOBODY; pending = 0
}

inline settle() {
  if :: new_needs > generation -> new_needs = 0 :: else fi;
  if :: new_needs != 0 -> pstep = new_step; new_needs = 0 :: else fi
}

/* With the parameters' lock; each store is a step. */
inline recover(p) {
  if
  :: atomic { runs(p) && journal == generation + 1 -> i = 0 };
       do
       :: atomic { runs(p) && i < records -> word[i] = saved[i]; i++ }
       :: atomic { runs(p) && i >= records -> break }
       od;
       atomic { runs(p) -> generation++; i = 0 }
  :: atomic { runs(p) && journal != generation + 1 -> skip }
  fi
}

proctype chief(byte p) {
  byte turns = TURNS;
  byte mine = 0;
  byte at = 0;
  byte i = 0;
  bit was_in = 0;
  bit skips = 0;
  bit lost = 0;

  do
  :: atomic { runs(p) && turns > 0 && !held && pending && step < STEPS ->         /* open_round */
       turns--; serial++; holder = p; mine = serial; at = step; lost = 0; was_in = 0 };
     if
     :: atomic { runs(p) -> skips = 0 }; goto update
     :: atomic { runs(p) -> skips = 1 }; goto update
     :: atomic { runs(p) -> goto leave }
     fi;
update:
     atomic { runs(p) && owner == NOBODY -> owner = p };
     atomic { runs(p) -> settle() };
     recover(p);
     if
     :: atomic { runs(p) && half_loaded -> owner = NOBODY; goto leave }
     :: atomic { runs(p) && !half_loaded -> skip }
     fi;
     atomic { runs(p) ->                                                      /* begin */
#ifndef BROKEN_NOT_ONCE
       was_in = (pstep == at + 1);
#endif
       if
       :: holder != p || serial != mine -> lost = 1
       :: else ->
#if !defined(BROKEN_NOT_FINAL) && !defined(BROKEN_MARK_LATE)
            final = (was_in -> 2 : 1); final_serial = mine
#else
            if :: was_in -> final = 2 :: else fi
#endif
       fi };
     if
     :: atomic { runs(p) && (lost || was_in) -> owner = NOBODY; if :: lost -> goto out :: else -> goto leave fi }
     :: atomic { runs(p) && !lost && !was_in -> skip }
     fi;
#ifdef BROKEN_STAMP_LATE
     if
     :: atomic { runs(p) && !skips -> saved[0] = word[0]; word[0] = word[0] + digit(at) }
     :: atomic { runs(p) && skips -> skip }
     fi;
#endif
     atomic { runs(p) -> records = 0 };
     atomic { runs(p) -> journal = generation + 1; i = 0 };                     /* begin of the lane */
#ifdef BROKEN_STAMP_LATE
     atomic { runs(p) -> if :: !skips -> i = 1; records = 1 :: else fi };
#endif
     do                                                                       /* save, publish, apply_rule */
     :: atomic { runs(p) && !skips && i < 2 -> saved[i] = word[i] };
#ifdef BROKEN_SAVE_LATE
        atomic { runs(p) -> word[i] = word[i] + digit(at) };
        atomic { runs(p) -> records = i + 1; i++ }
#else
        atomic { runs(p) -> records = i + 1 };
        atomic { runs(p) -> word[i] = word[i] + digit(at); i++ }
#endif
     :: atomic { runs(p) && (skips || i == 2) -> i = 0; break }
     od;
#ifdef BROKEN_STEP_EARLY
     atomic { runs(p) -> pstep = at + 1 };
#else
     atomic { runs(p) -> new_step = at + 1; new_needs = generation + 1 };       /* commit */
#endif
     atomic { runs(p) -> generation++; if :: skips && at == step -> skipped[at] = 1 :: else fi;
#ifdef BROKEN_MARK_LATE
       if :: holder == p && serial == mine -> final = 1; final_serial = mine :: else fi
#endif
     };
     atomic { runs(p) -> settle(); owner = NOBODY };
#ifndef BROKEN_NOT_FINAL
     atomic { runs(p) ->                                                      /* end */
       if :: holder == p && serial == mine -> final = 2 :: else fi };
#endif
leave:
     if
     :: atomic { runs(p) ->                                                   /* close_round, in order */
          if
          :: holder != p || serial != mine -> skip
#ifndef BROKEN_ENDS
          :: holder == p && serial == mine && final == 1 -> holder = NOBODY
          :: holder == p && serial == mine && final != 1 -> consume_round()
#else
          :: holder == p && serial == mine -> consume_round()
#endif
          fi }
     :: atomic { runs(p) ->                                                   /* by an exception */
          if
          :: holder == p && serial == mine -> holder = NOBODY;
#ifdef BROKEN_EXCEPTION
             final = 0
#endif
          :: else
          fi }
     fi;
out: skip
  :: atomic { runs(p) && turns == 0 -> through[p] = true; break }
  od
}

proctype worker(byte p) {
  byte left = GRADIENTS;
  byte at = 0;
  byte first = 0;
  byte second = 0;
  byte load = 0;

  do
  :: atomic { runs(p) && left > 0 -> left--; at = step; load = loads };
     atomic { runs(p) -> first = word[0] };
     atomic { runs(p) -> second = word[1] };
     atomic { runs(p) ->                                                      /* apply */
       if
       :: at == step && load == loads && step < STEPS && !held && final == 0 && !pending ->
            assert(half_loaded || (first == want && second == want));
            pending = 1
       :: else
       fi;
       first = 0; second = 0 }
  :: atomic { runs(p) && left == 0 -> through[p] = true; break }
  od
}

#ifdef ADVANCER
proctype advancer(byte p) {
  atomic { runs(p) && (pending || step > 0) && step < STEPS ->                  /* advance_step */
#ifndef BROKEN_ADVANCES
    if :: final != 1 -> consume_round() :: else fi;
#else
    consume_round();
#endif
    through[p] = true }
}
#endif

#ifdef LOADERS
proctype loading(byte p) {
  byte i = 0;

  atomic { runs(p) && step > 0 && owner == NOBODY -> owner = p };
  atomic { runs(p) -> settle() };
  recover(p);
  if
  :: atomic { runs(p) && loader != NOBODY && !dead[loader] -> owner = NOBODY; goto out }
  :: atomic { runs(p) && !(loader != NOBODY && !dead[loader]) ->                 /* Load::kBegins */
       word[0] = 0; word[1] = 0; pstep = 0; generation++; owner = NOBODY;
#ifndef BROKEN_LOAD
       loader = p
#endif
     }
  fi;
#ifdef BROKEN_LOAD_ENDS
  atomic { runs(p) && owner == NOBODY -> loader = NOBODY };
#endif
  atomic { runs(p) ->                                                         /* restore of the accumulator */
    step = 0; holder = NOBODY; final = 0; final_serial = 0; pending = 0;
    want = 0; skipped[0] = 0; skipped[1] = 0; skipped[2] = 0; skipped[3] = 0; loads++ };
  atomic { runs(p) && owner == NOBODY ->                                       /* Load::kEnds */
    if :: loader == p -> loader = NOBODY :: else fi };
out:
  atomic { runs(p) -> through[p] = true }
}
#endif

init {
  atomic {
    run chief(0);
#if CHIEFS > 1
    run chief(1);
#endif
    run worker(WORKER);
#ifdef ADVANCER
    run advancer(HELPER)
#endif
#ifdef LOADERS
    run loading(HELPER);
#if LOADERS > 1
    run loading(HELPER + 1)
#endif
#endif
  }
}

/* At the end: the next process to get the parameters' lock finds them whole. */
active proctype quiescence() {
  atomic {
    timeout ->
    if :: owner == NOBODY || !dead[owner] -> skip :: else -> assert(false) fi;
    if
    :: journal != generation + 1 -> assert(word[0] == word[1])
    :: else
    fi;
#if !STOPS
    if :: owner != NOBODY -> assert(false) :: else fi
#endif
  }
}

#define FATE_MAY_HOLD_BACK
#include "fate.pml"
