#!lua flags=allow-oom
-- The answers of an offer whose retirement is applied next, deleted in bounded steps, as `forget` does when it is decided.
--
-- KEYS[1] shard hash · KEYS[2] answers hash of the offer's campaign
-- ARGV[1] term · ARGV[2] owner · ARGV[3] life · ARGV[4] offer · ARGV[5] cursor · ARGV[6] fields a step
-- Returns the next cursor, '0' at the end; or the error LOST when another took the shard over.
--- @include "shard"
--- @include "records"

if not is_owner(KEYS[1], ARGV[1], ARGV[2], ARGV[3]) then return redis.error_reply('LOST the shard has another owner, term or life') end
return forget_answers(KEYS[2], ARGV[4], ARGV[5], ARGV[6])
