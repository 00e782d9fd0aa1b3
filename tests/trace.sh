# Sourced by scripts that replay a trace: a real one where there is one, else one that is made up.

# Names the trace, which is made in the directory $1 if need be. Says aloud which it is.
a_trace() {
    local trace=${KVBM_TRACES:-../shared/traces}/conversation.jsonl.gz
    if [[ ! -e $trace ]]; then
        echo "SKIPPED: $trace is not here (KVBM_TRACES says where traces are): the replay is of a made-up trace" >&2
        trace=$1/made-up.jsonl
        # Eighty conversations of a hundred turns, three requests a second; a turn adds a block of 512 tokens.
        awk 'BEGIN {
            for (turn = 1; turn <= 100; turn++) for (chat = 0; chat < 80; chat++) {
                ids = chat % 5
                for (block = 1; block < 8 + turn; block++) ids = ids ", " 1000 + 1000 * chat + block
                printf "{\"timestamp\": %d, \"input_length\": %d, \"output_length\": 100, \"hash_ids\": [%s]}\n",
                    300 * n++, (8 + turn) * 512, ids
            }
        }' >"$trace"
    fi
    echo "$trace"
}
