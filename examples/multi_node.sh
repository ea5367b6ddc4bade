#!/usr/bin/env bash
# Measures a cluster, plans for it, trains on it: several machines, no cluster manager.
#
# Run the same command on every machine, in the same folder with the same environment:
#
#   examples/multi_node.sh first-machine:29500 /shared/run [SETTING=VALUE ...]
#
# first-machine is a name or address at which the others reach the first machine; the port, and the
# next one, must be free there.  /shared/run is a folder that all machines see: cluster.yaml is what
# was measured, run/ the training with its checkpoints.  Settings are those of fusedrec train, such
# as steps=20000.  The same command goes on where it was stopped: what is there is not done again.
#
#   NODES=4     machines (2)
#   RANKS=8     processes on each (one for every GPU; one on a machine without)
#   CONFIG=...  training configuration (configs/multi_node.yaml)
#   INTERFACE   network interface for the ranks (the one that leads to the first machine)
#   IS_HOST     true on the first machine, false on the others (found by its address)
#   RATES_OF    cluster file of the same machines: only links are measured then
#   CALIBRATION_PORT  (the port + 1)
#
# On Slurm or Kubernetes use examples/slurm or examples/kubernetes.
set -euo pipefail

fail() {
    echo "multi_node.sh: $1" >&2
    exit 2
}

[ $# -ge 2 ] || fail "usage: multi_node.sh FIRST_MACHINE:PORT SHARED_FOLDER [SETTING=VALUE ...]"
endpoint=$1 shared=$2
shift 2
host=${endpoint%:*} port=${endpoint##*:}
[[ $endpoint == ?*:* && $port =~ ^[0-9]+$ ]] ||
    fail "the first machine is '$endpoint', must be HOST:PORT, such as 10.0.0.1:29500"
config=${CONFIG:-configs/multi_node.yaml}
[ -f "$config" ] || fail "CONFIG is '$config', which does not exist here ($(pwd))"
for command in torchrun fusedrec; do
    command -v $command > /dev/null ||
        fail "there is no $command: activate the environment that has fusedrec_torchrec"
done
mkdir -p "$shared" 2> /dev/null ||
    fail "cannot make the folder '$shared', which must be on a file system that all machines share"
nodes=${NODES:-2}
gpus=$(nvidia-smi -L 2> /dev/null | grep -c '^GPU ' || true)
device=$([ "$gpus" -gt 0 ] && echo cuda || echo cpu)
ranks=${RANKS:-$((gpus > 0 ? gpus : 1))}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
settings=() # of the training on this machine
if [ -n "${INTERFACE:-}" ]; then
    export NCCL_SOCKET_IFNAME="=$INTERFACE" # this one, not all that begin so
    settings+=("launch.interface=$INTERFACE")
fi

# How this machine takes part.  Its own host name does not tell: it may resolve to loopback.
found=$(python - "$host" "${INTERFACE:-}" << 'END'
import sys

from fusedrec_torchrec.training.network import interface_called, interface_towards, is_this_machine

host, name = sys.argv[1:]
try:
    interface = interface_called(name, "INTERFACE") if name else interface_towards(host)
except (OSError, ValueError) as error:
    sys.exit(f"multi_node.sh: no way to the first machine, {host}: {error}")
print(interface.name, interface.address, str(is_this_machine(host)).lower())
END
) || exit 2
read -r interface address is_host <<< "$found"
is_host=${IS_HOST:-$is_host}
echo "$nodes machines, $ranks ranks here ($device), through $interface ($address)" >&2

if [ ! -s "$shared/cluster.yaml" ]; then
    calibration=$host:${CALIBRATION_PORT:-$((port + 1))}
    echo "measuring the cluster, some minutes; machines meet at $calibration" >&2
    GLOO_SOCKET_IFNAME=$interface torchrun \
        --nnodes="$nodes" --nproc-per-node="$ranks" \
        --rdzv-backend=c10d --rdzv-endpoint="$calibration" --rdzv-id=calibration \
        --rdzv-conf="is_host=$is_host" --local-addr="$address" \
        -m fusedrec_torchrec.planner.calibrate.measure \
        --output "$shared/cluster.yaml" --device "$device" ${RATES_OF:+--rates-of "$RATES_OF"}
    [ -s "$shared/cluster.yaml" ] ||
        fail "'$shared' of this machine has no cluster.yaml: all machines must share this folder"
fi

# Every machine plans for itself: the same input makes the same plan.
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cat > "$scratch/planner.yaml" << END
train: $(realpath "$config")
cluster: $(realpath "$shared/cluster.yaml")
ranks: $((nodes * ranks))
END
fusedrec plan --config "$scratch/planner.yaml" --out "$scratch/plan.yaml" --quiet

arguments=(--config "$config")
for setting in "launch.nodes=$nodes" "launch.min_nodes=$nodes" "launch.ranks=$ranks" \
    "launch.rendezvous=$endpoint" "launch.is_host=$is_host" "${settings[@]}" \
    "logging.directory=$shared/run" "plan=$scratch/plan.yaml" "$@"; do
    arguments+=(--set "$setting")
done
if compgen -G "$shared/run/checkpoints/step_*" > /dev/null; then
    echo "going on from the last checkpoint in $shared/run" >&2
    arguments+=(--resume)
fi
# torchrun, with the machines' rendezvous watched: it says who did not come, and why.
fusedrec train "${arguments[@]}"
