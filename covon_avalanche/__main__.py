from covon_avalanche.cli import main

main()
