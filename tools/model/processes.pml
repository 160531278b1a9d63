/* Processes that may die or be stopped: what every model here shares (fate.pml strikes them).
 *
 * PROCESSES operating-system processes are numbered from 0. Each step of a process is one atomic
 * statement guarded by runs(p); between any two of them `fate` may strike:
 *
 *   death   at most DEATHS processes are killed, each between any two steps of its own. As in the
 *           kernel, all record locks of the process are dropped in the same instant (the macro
 *           kernel_drops_locks(p), which each model defines), and nothing else happens: its words in
 *           shared memory stay as the last step left them. This is sound for processes with several
 *           threads too: the kernel drops record locks when the last thread has left the process, so
 *           no thread can execute another instruction.
 *   stop    at most STOPS times a process is stopped (SIGSTOP, a debugger, swapped, starved), and
 *           goes on at any later time or never. It keeps its locks.
 *
 * Steps that change nothing are left out (a time slice ends, the process looks and sleeps again). So a
 * waiting process makes no steps: a run in which one waits for ever ends there, and a cycle is a
 * livelock. Each model is searched for cycles (there must be none: every run is finite, without any
 * assumption about fairness). At the end of every run it asserts that each process that lives and is
 * not stopped has finished its work.
 *
 * Memory is sequentially consistent here. That is sound, because all accesses that need an order have
 * one: a process that gets a record lock has passed through the kernel after the lock's last holder, and
 * a killed process leaves a prefix of its stores in program order (release stores keep the compiler to it).
 */
#ifndef DEATHS
#define DEATHS 0
#endif
#ifndef STOPS
#define STOPS 0
#endif

#define NOBODY 255

bool dead[PROCESSES + 1];  /* number PROCESSES: a model's observer, which never dies or stops */
byte stopped = NOBODY;

#define runs(p) (!dead[p] && stopped != (p))
