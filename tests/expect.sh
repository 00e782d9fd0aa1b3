# Sourced by scripts that check many lines and sum up at the end: what they say, and what must hold. Everything goes to
# standard error, since standard output ends with their result.

say() { printf '\n== %s (after %d s)\n' "$1" "$SECONDS" >&2; }

# Names of the lines that did not hold.
failed=()

# Notes a line that must hold: its name, then a command.
expect() {
    local name=$1
    shift
    if "$@"; then
        echo "ok: $name" >&2
    else
        echo "NOT SO: $name" >&2
        failed+=("$name")
    fi
}
