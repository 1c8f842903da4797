from benchmarks.evidence.command import main

main()
