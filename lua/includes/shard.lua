-- The shard's own state: its clock, its life, and the refusals that concern a whole call.
-- Needs KEYS[1], the shard hash.

-- The form of keys and records that these scripts read and write. A shard of an older one is rebuilt from the journal, one of a newer
-- one is left alone.
local LAYOUT = 1

-- The layout that a shard names; the first one was not named.
local function layout_of(named)
  return tonumber(named or 1)
end

-- A server's life is its run id and its replication id: the first changes at a restart, the second at every promotion.
local function life_of_server()
  local run_id = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
  local replication_id = string.match(redis.call('INFO', 'replication'), 'master_replid:(%w+)')
  return run_id .. replication_id
end

-- Milliseconds since 1970 by this server.
local function time_of_server()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- The owner's scripts do nothing unless term, owner and life are still those of its takeover.
local function is_owner(shard_key, term, owner, life)
  local held = redis.call('HMGET', shard_key, 'term', 'owner')
  return held[1] == term and held[2] == owner and life_of_server() == life
end
