#!/bin/bash{{ " -l" if modules else "" }}
# The report over all tasks of {{ name }}, to be made when they have ended:
#   sbatch --dependency=afterany:JOBID FILE
{% for option in options %}
#SBATCH {{ option }}
{% endfor %}

cd {{ folder|q }} || exit 78
{% for module in modules %}
module load {{ module|q }} || exit 78
{% endfor %}
exec {{ command }}
