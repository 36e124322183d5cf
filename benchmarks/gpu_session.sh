#!/usr/bin/env bash
# What needs GPUs, one part after another, each with a limit; raw results and logs go to a folder.
#
#   benchmarks/gpu_session.sh results families restart kills turns engine trainer sync rollout
#   TRACE=trace.jsonl.gz GPUS=2 benchmarks/gpu_session.sh results modes colocated checked
#   benchmarks/gpu_session.sh results alarms sampling learning
#
# A part that fails or exceeds its limit ends neither the others nor the session; the last lines say
# which did. PYTHON is the interpreter (python3), SHAPE the model (0.6B), GPUS how many are used (2),
# REPLICAS how many of them generate in a disaggregated run (half), STEPS those of `modes` (8),
# PROMPTS those of a batch (64 for each GPU), MODES what `colocated` compares; an empty CALIBRATE
# leaves the simulator's prediction out. Two calls with other CUDA_VISIBLE_DEVICES and TMPDIR may
# run beside each other.
set -uo pipefail

out=$(realpath -m "${1:?usage: gpu_session.sh FOLDER PART...}")
shift
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
shape=${SHAPE:-0.6B}
gpus=${GPUS:-2}
replicas=${REPLICAS:-$((gpus / 2))}
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$out"
cd "$out" || exit 1

part() { # NAME SECONDS COMMAND...
	local name=$1 limit=$2 began=$SECONDS mark=GPU_SESSION_PART=$1-$$
	shift 2
	env "$mark" timeout --kill-after=10 "$limit" "$@" >"$name.log" 2>&1
	summary+=("$name: exit $? after $((SECONDS - began)) s")
	tail -n 25 "$name.log"
	# what a part leaves that was cut off; /proc/PID/environ tells whose a process is
	grep -lsaz "^$mark\$" /proc/[0-9]*/environ | cut -d/ -f3 | xargs -r kill -9
}
tests() { # without --strict-config: a GPU host may lack plugins that these tests do not need
	"$python" -m pytest -c "$root/pyproject.toml" -o addopts=--import-mode=importlib \
		--rootdir "$root" -m gpu "$root/tests/gpu" "$@"
}
export -f tests
export root python
gpu() { part "$1" "$2" "$python" "$root/benchmarks/gpu.py" "${@:3}" --out "$out/gpu-$1.json"; }
modes() {
	part "$1" "$2" "$python" "$root/benchmarks/modes.py" --gpu --shape "$shape" \
		--trace "${TRACE:?the parts modes and colocated need TRACE}" --scale 0.25 --repeats 1 \
		--steps "${STEPS:-8}" --batch-prompts "${PROMPTS:-$((64 * gpus))}" --group-size 8 --max-num-seqs 256 \
		--replicas "$replicas" --train-workers $((gpus - replicas)) ${CALIBRATE---calibrate} \
		--out "$out/gpu-$1.json" "${@:3}"
}
learning() {
	part "$1" 450 "$python" "$root/benchmarks/learning.py" --gpu --hidden-size 512 \
		--num-layers 10 --set train.steps=96 --set train.batch_size=256 \
		--set train.learning_rate=3e-5 --set train.lr_schedule=linear --out "$out/gpu-$1.json" \
		--of-each $((gpus / 2)) "${@:2}"
}

summary=()
for name in "$@"; do
	case $name in
	families)
		part families 560 "$python" "$root/benchmarks/architectures.py" --device cuda --jobs 12
		cp "$root/benchmarks/results/architectures-gpu.json" "$out/"
		;;
	step) part step 150 bash -c 'tests -k "test_step or test_attention"' ;;
	restart) part restart 250 bash -c 'tests -k engines_find' ;;
	kills) part kills 560 bash -c 'tests -k killed' ;;
	turns) part turns 300 bash -c 'tests -k same_gpus' ;;
	engine) gpu engine 420 engine --shape "$shape" --repeats 2 ;;
	trainer) gpu trainer 300 trainer --shape "$shape" --gpus "$gpus" --variants bare ours "ours fp32" ;;
	large) gpu large 500 trainer --shape 4B --gpus "$gpus" --variants "ours fp32" --one-by-one --repeats 1 ;;
	sync) gpu sync 200 sync --shape "$shape" --gpus "$gpus" ;;
	rollout) gpu rollout 420 rollout --shape "$shape" --samples 512 --repeats 2 ;;
	modes) modes modes 900 --modes sync apr ;;
	colocated) modes colocated 900 --modes ${MODES:-sync:awake sync:turns apr} ;;
	alarms)
		part alarms 300 "$python" "$root/benchmarks/weight_check.py" --device cuda \
			--out "$out/gpu-weight-check.json"
		;;
	checked) CALIBRATE='' modes checked 400 --modes apr ;;
	sampling) learning sampling --modes apr --set rollout.sampling.temperature=0.7 --set rollout.sampling.top_k=8 ;;
	learning) learning learning ;;
	*) summary+=("$name: unknown") ;;
	esac
done
printf '%s\n' "${summary[@]}"
[[ ! " ${summary[*]} " =~ exit\ [1-9]|unknown ]]
