"""More is asked for than is trained on: groups without spread, answers that end first, those left unfinished."""
