"""Runs under Slurm: scripts for sbatch, and the end of a job's time."""
