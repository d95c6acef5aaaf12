from batchgen.cli import main

# The guard matters: spawned engine processes import the main module again.
if __name__ == "__main__":
    main()
