#!/bin/bash
#SBATCH --job-name=table
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --mem=64G
#SBATCH --time=04:00:00
#SBATCH --signal=B:TERM@120
# A job over many hosts: Ray on every node, the chief on the first, workers on all.
# Submit it from the folder with chief.py and worker.py, with shmacc and Ray installed on all nodes.
set -euo pipefail
umask 077

workers_per_node=${WORKERS_PER_NODE:-8}
steps=${STEPS:-200}
workers=$((workers_per_node * SLURM_JOB_NUM_NODES))

# Names in shared memory, ports and files are this job's own: a node may have others beside it.
export SHMACC_NAMESPACE=job-$SLURM_JOB_ID
export OPENBLAS_NUM_THREADS=1
export RAY_USAGE_STATS_ENABLED=0
# Ray takes its part of /dev/shm when it starts: else a full one kills it (a bus error).
export RAY_preallocate_plasma_memory=1
store=${OBJECT_STORE_BYTES:-$((2 << 30))}
port=$((20000 + SLURM_JOB_ID % 10000))
head=$(hostname)
address=$(hostname --all-ip-addresses) # not --ip-address, which may be a loopback one
address=${address%% *}
export RAY_ADDRESS=$address:$port

# Ray runs all code that comes with the token. It is in a file that only this user can read,
# in a folder that all nodes see, and not in the environment, which tools may log.
token=$SLURM_SUBMIT_DIR/.ray-token-$SLURM_JOB_ID
python -c 'import secrets; print(secrets.token_hex(32), end="")' >"$token"
export RAY_AUTH_MODE=token
export RAY_AUTH_TOKEN_PATH=$token

# shellcheck disable=SC2317,SC2329  # it is the trap that calls it
end() {
    trap - EXIT
    pids=$(jobs -pr)
    # shellcheck disable=SC2086  # a word for each
    [[ -z $pids ]] || kill $pids || true
    wait || true
    # What a chief that was killed could not remove: names of this job that nothing has attached.
    # shellcheck disable=SC2016  # a node expands it
    srun --overlap --ntasks-per-node=1 \
        bash -c 'shmacc-inspect clean --yes; rm -rf "/tmp/ray-$SLURM_JOB_ID"' || true
    rm -f "$token"
}
trap end EXIT
trap 'exit 143' TERM INT

ray_on() { # srun's options, then those of ray start
    srun --overlap --cpus-per-task="$SLURM_CPUS_PER_TASK" "$@" --block --disable-usage-stats \
        --object-store-memory="$store" &
}

ray_on --nodes=1 --ntasks=1 --nodelist="$head" ray start --head --node-ip-address="$address" \
    --port="$port" --include-dashboard=false --temp-dir="/tmp/ray-$SLURM_JOB_ID"
timeout 300 bash -c 'until ray status >/dev/null 2>&1; do sleep 1; done'
if ((SLURM_JOB_NUM_NODES > 1)); then
    others=$((SLURM_JOB_NUM_NODES - 1))
    ray_on --nodes="$others" --ntasks="$others" --exclude="$head" ray start --address="$RAY_ADDRESS"
fi

# Workers wait until their node has the segment, and are numbered over all nodes.
# shellcheck disable=SC2016  # SLURM_PROCID is the worker's
srun --overlap --ntasks="$workers" --ntasks-per-node="$workers_per_node" --cpus-per-task=1 \
    bash -c 'exec python worker.py "$SLURM_PROCID"' &

# Whatever ends the chief, the next one goes on with the parameters that the nodes have.
for _ in 1 2 3 4 5; do
    python chief.py "$workers" "$steps" & # in the background, so that the traps run at once
    wait $! && exit
done
exit 1
