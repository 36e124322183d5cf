#!/usr/bin/env bash
# What needs GPUs, one part after another, each with a limit; raw results and logs go to a folder.
#
#   benchmarks/gpu_session.sh results kills turns engine trainer sync rollout
#   TRACE=trace.jsonl.gz GPUS=2 benchmarks/gpu_session.sh results modes colocated
#
# A part that fails or exceeds its limit ends neither the others nor the session; the last lines say
# which did. PYTHON is the interpreter (python3), SHAPE the model (0.6B), GPUS how many are used (2).
set -uo pipefail

out=$(realpath -m "${1:?usage: gpu_session.sh FOLDER PART...}")
shift
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
shape=${SHAPE:-0.6B}
gpus=${GPUS:-2}
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$out"
cd "$out" || exit 1

part() { # NAME SECONDS COMMAND...
	local name=$1 limit=$2 began=$SECONDS
	shift 2
	timeout --kill-after=10 "$limit" "$@" >"$name.log" 2>&1
	summary+=("$name: exit $? after $((SECONDS - began)) s")
	tail -n 25 "$name.log"
}
tests() { "$python" -m pytest -c "$root/pyproject.toml" --rootdir "$root" -m gpu "$root/tests/gpu" "$@"; }
export -f tests
export root python
gpu() { part "$1" "$2" "$python" "$root/benchmarks/gpu.py" "${@:3}" --out "$out/gpu-$1.json"; }
modes() {
	part "$1" "$2" "$python" "$root/benchmarks/modes.py" --gpu --shape "$shape" \
		--trace "${TRACE:?the parts modes and colocated need TRACE}" --scale 0.5 --repeats 1 \
		--steps 8 --batch-prompts 32 --group-size 8 --max-num-seqs 256 --modes sync apr \
		--replicas $((gpus / 2)) --train-workers $((gpus - gpus / 2)) \
		--out "$out/gpu-$1.json" "${@:3}"
}

summary=()
for name in "$@"; do
	case $name in
	step) part step 150 bash -c 'tests -k "not whole_runs"' ;;
	kills) part kills 300 bash -c 'tests -k killed' ;;
	turns) part turns 200 bash -c 'tests -k turns' ;;
	engine) gpu engine 300 engine --shape "$shape" --repeats 2 ;;
	trainer) gpu trainer 300 trainer --shape "$shape" --gpus "$gpus" --variants bare ours "ours fp32" ;;
	sync) gpu sync 200 sync --shape "$shape" --gpus "$gpus" ;;
	rollout) gpu rollout 300 rollout --shape "$shape" ;;
	modes) modes modes 560 --calibrate ;;
	colocated) modes colocated 560 --colocated sync ;;
	*) summary+=("$name: unknown") ;;
	esac
done
printf '%s\n' "${summary[@]}"
[[ ! " ${summary[*]} " =~ exit\ [1-9]|unknown ]]
