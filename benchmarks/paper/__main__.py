from benchmarks.paper import main

main()
