"""`python -m shardwise` is the command line."""

from shardwise.cli.main import main

raise SystemExit(main())
