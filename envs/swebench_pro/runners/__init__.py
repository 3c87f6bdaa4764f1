"""The files that `make` puts beside an instance: a run_script.sh, and a parser.py for each runner."""
