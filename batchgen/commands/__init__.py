"""The commands of the command line. What is heavy is imported inside of them: `batchgen --help` answers at once."""
