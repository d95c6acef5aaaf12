#!/bin/bash{{ " -l" if modules else "" }}
# {{ name }}: {{ tasks }} tasks with a share of the documents each. A task that starts again goes on where it was.
{% if array %}
#   sbatch FILE                        all tasks
#   sbatch --array=2,5-7 FILE          some of them: a task's share is the same whichever others run
#   sbatch --array=1-{{ tasks }} FILE -1{{ " " * (10 - tasks|string|length) }}other numbers: the last word is added to each
{% endif %}
{% for option in options %}
#SBATCH {{ option }}
{% endfor %}

refuse() { echo "$1" >&2; exit 78; }
{% if requeue %}
begun=$(date +%s)
{% if array %}
run='' warned=''
# The warning comes to this shell alone, which passes it on.
trap 'warned=1; [[ -z $run ]] || kill -USR1 "$run"' USR1
{% endif %}
# At scancel, at a preemption and at the limit itself every process gets this one. The shell has to outlive the run.
ended=''
trap 'ended=1' TERM
{% endif %}

# The number of shares is fixed here: Slurm's own count of tasks is another one when only some of them run again.
shards={{ tasks }}
{% if array %}
offset=${1:-0}
[[ -n ${SLURM_ARRAY_TASK_ID:-} ]] || refuse "this is a script for sbatch, with tasks 0-$((shards - 1))"
[[ $offset =~ ^-?(0|[1-9][0-9]*)$ ]] || refuse "$offset: a number is wanted, to be added to the numbers of the tasks"
first=${SLURM_ARRAY_TASK_MIN:-$SLURM_ARRAY_TASK_ID} last=${SLURM_ARRAY_TASK_MAX:-$SLURM_ARRAY_TASK_ID}
(( first + offset >= 0 && last + offset < shards )) ||
  refuse "there are $shards shares, for tasks 0-$((shards - 1)); for other numbers write after the script's name \
what is to be added to them: sbatch --array=1-$shards FILE -1"
shard=$((SLURM_ARRAY_TASK_ID + offset))
{% if requeue %}
job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID  # SLURM_JOB_ID of one of the tasks means the whole array elsewhere
{% endif %}
{% else %}
[[ ${SLURM_NTASKS:-} == "$shards" ]] || refuse "this is a script for sbatch, with the $shards tasks of its head"
{% if requeue %}
job=$SLURM_JOB_ID
{% endif %}
{% endif %}

cd {{ folder|q }} || exit 78
{% for module in modules %}
module load {{ module|q }} || exit 78
{% endfor %}
# Nothing is looked up on the Hub: compute nodes mostly have no network, and a look-up would hang.
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1
{% if array %}
# Nodes that share a folder with compiled code corrupt it. batchgen has one for each; so do those that you have set.
{{ caches }}
# Tasks side by side on a node: Slurm gives each its GPUs, this line its own ports.
export VLLM_PORT=$((20000 + SLURM_JOB_ID % 625 * 64))
echo "$(date '+%F %T') share $shard/$shards on ${SLURMD_NODENAME:-$HOSTNAME}, start $((${SLURM_RESTART_COUNT:-0} + 1))"
{% else %}
echo "$(date '+%F %T') $shards shares on $SLURM_JOB_NODELIST, start $((${SLURM_RESTART_COUNT:-0} + 1))"
{% endif %}
{% if requeue %}
{% if array %}
[[ -z $ended$warned ]] || exit 75
{% else %}
[[ -z $ended ]] || exit 75
{% endif %}

# In the background: bash would hear no signal while it waits for a child in the foreground.
{% endif %}
{% if array %}
{{ before }}{{ command }} --shard "$shard/$shards"{{ after }}
{% else %}
# In the task: nodes that share a folder with compiled code corrupt it, so those that you have set get one for each, as
# batchgen's own are. Tasks side by side on a node have their GPUs by Slurm, and ports by the second line.
# shellcheck disable=SC2016
{{ before }}srun {{ step }} bash -c '
  {{ caches }}
  export VLLM_PORT=$((20000 + (SLURM_JOB_ID + SLURM_LOCALID) % 625 * 64))
  exec "$@" --shard "$SLURM_PROCID/{{ tasks }}"' task \
  {{ command }}{{ after }}
{% endif %}
{% if requeue %}
run=$!
{% if array %}
[[ -z $warned ]] || kill -USR1 "$run"
{% endif %}
while kill -0 "$run" 2>/dev/null; do wait "$run"; done  # a signal interrupts `wait`
wait "$run"
status=$?

# Back into the queue goes a task whose time was over, as long as it gets something done in it; and for some hours one
# whose share others still hold: its former self after its node was lost, or the tasks of an array before this one.
if [[ $status == 75 && -z $ended ]]; then
{% if array %}
{% if tasks == 1 %}
  written=(-name "part-*-00000-*" -o -name "answers-00000.*")
{% else %}
  label=$(printf %05dof%05d "$shard" "$shards")
  written=(-name "part-*-$label-*" -o -name "answers-$label.*")
{% endif %}
{% else %}
  written=(-name "part-*" -o -name "answers-*")
{% endif %}
  if [[ -n $(find {{ run_dir|q }} -maxdepth 2 "(" "${written[@]}" ")" -newermt "@$begun" -print -quit) ]]; then
    scontrol requeue "$job"
  else
    echo "nothing was finished in this time, so it is not put back into the queue: give it more (--time)" >&2
  fi
elif [[ $status == 73 && ${SLURM_RESTART_COUNT:-0} -lt 100 ]]; then
  scontrol requeue "$job"
fi
exit "$status"
{% endif %}
