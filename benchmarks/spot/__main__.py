from benchmarks.spot.command import main

main()
