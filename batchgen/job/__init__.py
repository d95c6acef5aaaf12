"""What a job file may say, and how it is read."""
