from thinwire.cli import main

main()
