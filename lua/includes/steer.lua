-- The common course of commands about an offer itself (pause, resume, close): look up the repeat, refuse, act, write.
-- Needs the includes `decide`, `repeats`, `offers`, and the keys and arguments of their scripts:
-- KEYS[8 + 4i] offer hash · KEYS[9 + 4i] users hash · KEYS[10 + 4i] parts string · KEYS[11 + 4i] answers hash, of the i-th command;
-- ARGV[6] msgpack: a list of {id, offer, campaign, digest}.

-- `act(call, offer, id, digest)` changes the offer, adds its event and returns the outcome's code and the amount of the answer.
local function steer(act)
  local call, refused = begin_call()
  if not call then return cmsgpack.pack(refused) end
  -- What this call has made of a command id counts for the commands behind it.
  local offers, records, refusals, rows = {}, {}, {}, {}
  local commands = cmsgpack.unpack(ARGV[6])
  for i = 1, #commands do
    local id, name, campaign, digest = unpack(commands[i])
    local base = 4 + 4 * i
    local answers_key = KEYS[base + 3]
    local field, record_field = refusal_field(campaign, id), answers_key .. id
    local offer = offers[name] or load_offer(name, KEYS[base])
    local record = records[record_field] or redis.call('HGET', answers_key, id)
    local refusal = refusals[field] or redis.call('HGET', KEYS[3], field)
    local row = repeated_row(record, refusal, digest, call.now, offer and offer.parts)
    if not row and not offer then row = {NO_SUCH_OFFER, 0, call.now} end
    if not row and offer.closed then row = {OVER, 0, call.now} end
    if row and row[8] ~= 1 and row[1] ~= CONFLICT then
      refusals[field] = refuse(call, row[1], field, name, digest)
    end
    if not row then
      offers[name] = offer
      offer.users_key, offer.parts_key, offer.answers_key = KEYS[base + 1], KEYS[base + 2], answers_key
      local left = offer.units_left
      local code, amount = act(call, offer, id, digest)
      record = pack_answer(code, call.seq, call.now, left, amount, digest, offer.tail)
      records[record_field] = record
      offer.answers[#offer.answers + 1] = id
      offer.answers[#offer.answers + 1] = record
      row = {code, call.seq, call.now, amount, 0, 0, left}
    end
    rows[i] = row
  end
  append_events(call)
  for _, offer in pairs(offers) do
    write_offer(call, offer, offer.users_key, offer.parts_key, offer.answers_key)
  end
  write_refusals(call)
  return cmsgpack.pack({0, call.history, rows})
end
