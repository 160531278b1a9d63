/* Kills and stops processes; processes.pml says what that means and why it is sound. A model includes this
 * file after its own variables, kernel_drops_locks(p) and finished(p) (from then on p is spared). The model
 * defines FATE_MAY_HOLD_BACK if runs with fewer deaths or stops matter, too.
 */
#if DEATHS || STOPS

#define may_strike(p) (!dead[p] && !finished(p))
/* For 2, 3 or 4 processes. */
#define may_strike_someone \
  (may_strike(0) || may_strike(1) || may_strike(PROCESSES - 2) || may_strike(PROCESSES - 1))

inline choose_victim() {
  if
  :: may_strike(0) -> victim = 0
  :: may_strike(1) -> victim = 1
#if PROCESSES > 2
  :: may_strike(2) -> victim = 2
#endif
#if PROCESSES > 3
  :: may_strike(3) -> victim = 3
#endif
  fi
}

active proctype fate() {
  byte victim;
  byte deaths = DEATHS;
  byte stops = STOPS;

  do
#if DEATHS
  :: atomic {                                                 /* SIGKILL */
       deaths > 0 && may_strike_someone ->
       choose_victim();
       deaths--;
       dead[victim] = true;
       if :: stopped == victim -> stopped = NOBODY :: else fi;
       kernel_drops_locks(victim);
       victim = 0
     }
#endif
#if STOPS
  :: atomic {                                                 /* SIGSTOP */
       stops > 0 && stopped == NOBODY && may_strike_someone ->
       choose_victim();
       stops--;
       stopped = victim;
       victim = 0
     }
  :: atomic { stopped != NOBODY -> stopped = NOBODY }         /* SIGCONT */
#endif
#ifdef FATE_MAY_HOLD_BACK
  :: break                                                    /* nothing more happens */
#endif
  od
}
#endif
