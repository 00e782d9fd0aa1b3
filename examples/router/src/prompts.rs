//! How long a prompt is, and which one it begins like. The router has no tokenizer: four bytes of
//! text count as a token.

use serde_json::Value;
use xxhash_rust::xxh3::xxh3_64_with_seed;

const TOKEN_BYTES: usize = 4;
/// Tokens between two prefixes that get a name.
const STEP_TOKENS: u32 = 64;

/// A prompt as bytes, with the names of its prefixes: equal names are equal beginnings.
#[derive(Debug)]
pub(crate) struct PromptText {
    tokens: u32,
    names: Vec<u64>,
}

impl PromptText {
    /// Of a request's body: its prompt, as text or token ids, or its messages.
    pub(crate) fn of(body: &Value) -> Self {
        let salt = ["model", "cache_salt"].map(|key| &body[key]);
        let seed = xxh3_64_with_seed(format!("{salt:?}").as_bytes(), 0);
        match &body["prompt"] {
            Value::String(text) => Self::of_bytes(text.as_bytes(), seed),
            Value::Array(ids) if ids.iter().all(Value::is_u64) => {
                let ids = ids.iter().filter_map(Value::as_u64);
                Self::of_bytes(
                    &ids.flat_map(|id| (id as u32).to_le_bytes()).collect::<Vec<_>>(),
                    seed,
                )
            }
            Value::Null => Self::of_bytes(body["messages"].to_string().as_bytes(), seed),
            other => Self::of_bytes(other.to_string().as_bytes(), seed),
        }
    }

    fn of_bytes(bytes: &[u8], seed: u64) -> Self {
        let steps = bytes.chunks_exact(STEP_TOKENS as usize * TOKEN_BYTES);
        let names = steps.scan(seed, |name, step| {
            *name = xxh3_64_with_seed(step, *name);
            Some(*name)
        });
        let tokens = bytes.len().div_ceil(TOKEN_BYTES);
        Self { names: names.collect(), tokens: u32::try_from(tokens).unwrap_or(u32::MAX) }
    }

    pub(crate) const fn tokens(&self) -> u32 {
        self.tokens
    }

    /// Names of its prefixes, the shortest first.
    pub(crate) fn names(&self) -> impl DoubleEndedIterator<Item = u64> {
        self.names.iter().copied()
    }

    /// Tokens of its longest prefix that is held, if all shorter ones are.
    pub(crate) fn held(&self, is_held: impl FnMut(u64) -> bool) -> u32 {
        let mut is_held = is_held;
        self.names().take_while(|&name| is_held(name)).count() as u32 * STEP_TOKENS
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn equal_beginnings_have_equal_names() {
        let text = "x".repeat(1_000);
        let names = |body: Value| PromptText::of(&body).names;
        let one = names(json!({"prompt": text}));
        assert_eq!((one.len(), PromptText::of(&json!({"prompt": text})).tokens()), (3, 250));
        let longer = names(json!({"prompt": format!("{text}{}", "y".repeat(100))}));
        assert_eq!((&longer[..3], longer.len()), (&one[..], 4));
        assert_ne!(names(json!({"prompt": text, "model": "other"}))[0], one[0]);
        assert_ne!(names(json!({"prompt": text, "cache_salt": "a"}))[0], one[0]);
    }

    #[test]
    fn a_prompt_may_be_ids_or_messages() {
        assert_eq!(PromptText::of(&json!({"prompt": [1, 2, 3]})).tokens(), 3);
        let chat = json!({"messages": [{"role": "user", "content": "z".repeat(600)}]});
        assert!(PromptText::of(&chat).tokens() > 150);
        assert_eq!(PromptText::of(&json!({})).names().count(), 0);
    }
}
