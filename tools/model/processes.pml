/* Processes that may die or be stopped, for all models; fate.pml kills and stops them.
 *
 * PROCESSES operating-system processes are numbered from 0. Each step of a process is one atomic statement guarded by
 * runs(p); between any two of them `fate` may strike:
 *
 *   death   at most DEATHS processes are killed. As in the kernel, all record locks of the process are dropped in the
 *           same instant (kernel_drops_locks(p), which each model defines), and nothing else happens: its words in
 *           shared memory stay as the last step left them. This is sound for processes with several threads too: the
 *           kernel drops record locks when the last thread has left the process, so no thread can execute another
 *           instruction.
 *   stop    at most STOPS times a process is stopped (SIGSTOP, a debugger, swapped, starved), and goes on at any
 *           later time or never. It keeps its locks.
 *
 * Steps that change nothing are left out (a time slice ends, the process looks and sleeps again). So a waiting process
 * makes no steps: a run in which a process waits for ever ends there, and a cycle is a livelock. There must be no
 * cycle: every run is finite, without any assumption about fairness. At the end of a run each process that lives and is
 * not stopped has finished its work.
 *
 * Memory is sequentially consistent here; README.md ("What the models do not show") says why that is sound. A killed
 * process leaves a prefix of its stores in program order: release stores keep the compiler to it.
 *
 * Unless a case says otherwise: DEATHS=0 STOPS=0
 */
#define NOBODY 255

bool dead[PROCESSES + 1];  /* number PROCESSES: a model's observer, which never dies or stops */
byte stopped = NOBODY;

#define runs(p) (!dead[p] && stopped != (p))

/* ACTOR makes the steps: in most models the process `me`. With threads, `me` is a thread of the process `my`. */
#ifndef ACTOR
#define ACTOR me
#endif
#define step(action) atomic { runs(ACTOR) -> action }

/* Makes the steps if the condition holds. Reading the condition is a step of its own. */
#define when(condition, ...) \
  if \
  :: atomic { runs(ACTOR) && (condition) -> skip }; __VA_ARGS__ \
  :: atomic { runs(ACTOR) && !(condition) -> skip } \
  fi

/* Whether process p need not do anything more when a run ends. */
#define is_through(p) (ended[p] || dead[p] || stopped == p)

#define dropped_by(p, holder) holder = (holder == p -> NOBODY : holder)

/* on(FLAG) is 1 if spin was called with -DFLAG, else 0. (FLAG expands to 1, IS_1 to "0,": so the 1 is second, not 0.)
 * Each way in which a model may be broken is such a flag. Where only a broken variant reads a variable, use `only`:
 * else spin keeps the variable in the states of all variants.
 */
#define on(flag) is_one(flag)
#define is_one(value) second_of(IS_##value 1, 0, 0)
#define second_of(...) second_argument(__VA_ARGS__)
#define second_argument(first, second, ...) second
#define IS_1 0,

/* only(FLAG, steps) and unless(FLAG, steps) are these steps, or nothing. */
#define only(flag, ...) choice(only, on(flag))(__VA_ARGS__)
#define unless(flag, ...) choice(unless, on(flag))(__VA_ARGS__)
#define choice(what, bit) pasted(what, bit)
#define pasted(what, bit) what##_if_##bit
#define only_if_1(...) __VA_ARGS__
#define only_if_0(...)
#define unless_if_1(...)
#define unless_if_0(...) __VA_ARGS__
