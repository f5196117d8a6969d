"""How processes share work: who this process is, sums over all, and the one owner of gradient scale."""
