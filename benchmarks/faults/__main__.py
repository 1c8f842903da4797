from benchmarks.faults import main

main()
