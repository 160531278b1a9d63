/* Processes that may die or be stopped: what every model here shares (fate.pml strikes them).
 *
 * PROCESSES operating-system processes are numbered from 0. Each step of a process is one atomic
 * statement guarded by runs(p); between any two of them `fate` may strike:
 *
 *   death   at most DEATHS processes are killed, each between any two steps of its own. As in the
 *           kernel, everything that the process held in record locks is dropped in the same instant
 *           (the macro kernel_drops_locks(p), which each model defines), and nothing else happens: its
 *           words in shared memory stay as the last step left them. This is sound for processes of
 *           several threads too: record locks go when the last thread has left the process, that is
 *           when none can execute another instruction.
 *   stop    at most STOPS times a process is stopped (SIGSTOP, a debugger, swapped, starved), and
 *           goes on at any later time or never. It keeps its locks.
 *
 * A step that would change nothing (a slice of time that is over, a look, and back to sleep) is left out.
 * So a process that waits stands still, a run in which somebody waits for ever is a run that ends there,
 * and a cycle is a livelock. Each model is searched for cycles (there must be none: every run is finite,
 * without any assumption about fairness), and asserts at the end of every run that whoever lives and is
 * not stopped has got what it came for.
 *
 * Memory is sequentially consistent here. That is sound, because all that must be ordered is ordered:
 * who gets a record lock has passed through the kernel after its last holder, and a killed process
 * leaves a prefix of its stores in program order (release stores keep the compiler to it).
 */
#ifndef DEATHS
#define DEATHS 0
#endif
#ifndef STOPS
#define STOPS 0
#endif

#define NOBODY 255

bool dead[PROCESSES + 1];  /* number PROCESSES: an observer of a model's own, whom fate spares */
byte stopped = NOBODY;

#define runs(p) (!dead[p] && stopped != (p))
