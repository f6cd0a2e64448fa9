from shard_runner.cli import main

main()
