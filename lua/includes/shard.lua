-- The shard's own state: its clock, its epoch, and the refusals that concern a whole call.
-- Needs KEYS[1], the shard hash.

-- The form of keys and records that these scripts read and write. A shard of an older one is rebuilt from the
-- journal, one of a newer one is left alone. 1: subkeys of an offer and a campaign after ':'; 2: after '/',
-- which no id contains. Also in lua/keys.py.
local LAYOUT = 2

-- The layout that a shard names. The first layout was not named; a shard that has no seq was never
-- reconciled, and is new.
local function layout_of(named, seq)
  return tonumber(named or (seq and 1 or LAYOUT))
end

-- A server's epoch is its run id and its replication id: the first changes at a restart, the second at every
-- promotion.
local function server_epoch()
  local run_id = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
  local replication_id = string.match(redis.call('INFO', 'replication'), 'master_replid:(%w+)')
  return run_id .. replication_id
end

-- Milliseconds since 1970 by this server.
local function time_of_server()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- The owner's scripts do nothing unless term, owner and epoch are still those of its takeover.
local function is_owner(shard_key, term, owner, epoch)
  local held = redis.call('HMGET', shard_key, 'term', 'owner')
  return held[1] == term and held[2] == owner and server_epoch() == epoch
end
