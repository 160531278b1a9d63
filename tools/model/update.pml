/* Updates of parameters in rounds (native/parameters/update.hpp).
 *
 * Modelled: CHIEFS processes that each, TURNS times, open the round, then update, skip, or do neither, and leave the
 * block in order or by an exception, at any point. One worker that reads the step, then the parameters word by word,
 * then applies, GRADIENTS times. With ADVANCER one more process calls advance_step at any time. LOADERS processes load
 * a checkpoint of the run's beginning, at any time: they mark the parameters and load them, then load the accumulator,
 * then remove the mark. Every save, count, store and commit of an update is a step.
 *
 * Abstracted, besides what README.md says: there are no lanes; a change of the accumulator's record is one step, as
 * under all lanes' locks. Nobody queues for a round (line.pml). A load commits the parameters in one step. A worker
 * applies nothing that it computed before a load: in reality workers do not outlive a load.
 *
 * Checked, too: at the end of a run the parameters hold no half of an update, unless the journal can undo it.
 *
 * Unless a case says otherwise: CHIEFS=2 TURNS=2 GRADIENTS=2
 */
#define WORKER CHIEFS
#if defined(ADVANCER)
#define PROCESSES (CHIEFS + 2)
#elif defined(LOADERS)
#define PROCESSES (CHIEFS + 1 + LOADERS)
#else
#define PROCESSES (CHIEFS + 1)
#endif
#define HELPER (CHIEFS + 1)
#define STEPS 3
#define ACTOR p

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
byte journal = 0;        /* the generation that its update would commit */
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
#define half_loaded (loader != NOBODY && !(dead[loader] && on(BROKEN_LOAD_DEATH)))
#define kernel_drops_locks(p) dropped_by(p, owner)
#define finished(p) through[p]

/* Consumes the round, and checks that the parameters are what it should have made of them. */
inline consume_round() {
  if
  :: final == 2 && !skipped[step] ->
       want = want + digit(step);
       assert(half_loaded || (word[0] == want && word[1] == want))
  :: else fi;
  assert(final != 1 || on(BROKEN_ENDS) || on(BROKEN_ADVANCES));
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

#define is_open (holder == p && serial == mine)
proctype chief(byte p) {
  byte turns = TURNS;
  byte mine, at, i;
  bit was_in, skips, lost;

  do
  :: atomic { runs(p) && turns > 0 && !held && pending && step < STEPS ->         /* open_round */
       turns--; serial++; holder = p; mine = serial; at = step; lost = 0; was_in = 0 };
     if
     :: step(skips = 0)
     :: step(skips = 1)
     :: step(goto leave)
     fi;
     atomic { runs(p) && owner == NOBODY -> owner = p };
     atomic { runs(p) -> settle() };
     recover(p);
     step(if :: half_loaded -> owner = NOBODY; goto leave :: else fi);
     atomic { runs(p) ->                                                      /* begin */
       was_in = (pstep == at + 1 && !on(BROKEN_NOT_ONCE));
       if
       :: !is_open -> lost = 1
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
     only(BROKEN_STAMP_LATE, step(if :: !skips -> saved[0] = word[0]; word[0] = word[0] + digit(at) :: else fi);)
     atomic { runs(p) -> records = 0 };
     atomic { runs(p) -> journal = generation + 1; i = 0 };                     /* begin of the lane */
     only(BROKEN_STAMP_LATE, atomic { runs(p) -> if :: !skips -> i = 1; records = 1 :: else fi };)
     do                                                                       /* save, publish, apply_rule */
     :: atomic { runs(p) && !skips && i < 2 -> saved[i] = word[i] };
        only(BROKEN_SAVE_LATE, atomic { runs(p) -> word[i] = word[i] + digit(at) };)
        atomic { runs(p) -> records = i + 1 only(BROKEN_SAVE_LATE, ; i++) };
        unless(BROKEN_SAVE_LATE, atomic { runs(p) -> word[i] = word[i] + digit(at); i++ })
     :: atomic { runs(p) && (skips || i == 2) -> i = 0; break }
     od;
     only(BROKEN_STEP_EARLY, atomic { runs(p) -> pstep = at + 1 };)
     unless(BROKEN_STEP_EARLY, atomic { runs(p) -> new_step = at + 1; new_needs = generation + 1 };)  /* commit */
     atomic { runs(p) -> generation++; if :: skips && at == step -> skipped[at] = 1 :: else fi;
       only(BROKEN_MARK_LATE, if :: is_open -> final = 1; final_serial = mine :: else fi)
     };
     atomic { runs(p) -> settle(); owner = NOBODY };
#ifndef BROKEN_NOT_FINAL
     atomic { runs(p) ->                                                      /* end */
       if :: is_open -> final = 2 :: else fi };
#endif
leave:
     if
     :: atomic { runs(p) ->                                                   /* leaves the block in order */
          if
          :: is_open && final == 1 && !on(BROKEN_ENDS) -> holder = NOBODY
          :: is_open && (final != 1 || on(BROKEN_ENDS)) -> consume_round()
          :: else fi }
     :: atomic { runs(p) ->                                                   /* leaves it by an exception */
          if :: is_open -> holder = NOBODY; final = (on(BROKEN_EXCEPTION) -> 0 : final) :: else fi }
     fi;
out: skip
  :: atomic { runs(p) && turns == 0 -> through[p] = true; break }
  od
}

proctype worker(byte p) {
  byte left = GRADIENTS;
  byte at, first, second, load;

  do
  :: atomic { runs(p) && left > 0 -> left--; at = step; load = loads };
     atomic { runs(p) -> first = word[0] };
     atomic { runs(p) -> second = word[1] };
     atomic { runs(p) ->                                                      /* apply */
       if
       :: at == step && load == loads && step < STEPS && !held && final == 0 && !pending ->
            assert(half_loaded || (first == want && second == want));
            pending = 1
       :: else fi;
       first = 0; second = 0 }
  :: atomic { runs(p) && left == 0 -> through[p] = true; break }
  od
}

#ifdef ADVANCER
proctype advancer(byte p) {
  atomic { runs(p) && (pending || step > 0) && step < STEPS ->                  /* advance_step */
    if :: final != 1 || on(BROKEN_ADVANCES) -> consume_round() :: else fi;
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
       word[0] = 0; word[1] = 0; pstep = 0; generation++; owner = NOBODY; loader = (on(BROKEN_LOAD) -> loader : p)
     }
  fi;
  only(BROKEN_LOAD_ENDS, atomic { runs(p) && owner == NOBODY -> loader = NOBODY };)
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
    only(ADVANCER, run advancer(HELPER))
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
    assert(owner == NOBODY || (STOPS && !dead[owner]));
    assert(journal == generation + 1 || word[0] == word[1])
  }
}

#define FATE_MAY_HOLD_BACK
#include "fate.pml"
