-- How to carry out commands about an offer or a grab: look up the repeat, refuse, act, write.
-- ARGV[6] msgpack: {offers, campaign of each (from 1), campaigns, ids, offer of each command (from 1),
--   digests, bodies}. A body that has `whole` is kept as that with its answer, and compared as that. Commands
--   that the call has no room for get no row: they go into the next one.
--- @include "cost"
--- @include "records"
--- @include "decide"
--- @include "repeats"
--- @include "offers"
--- @include "pieces"
--- @include "settling"

local function refused_row(call, code, more)
  return {code, 0, call.now, 0, 0, 0, 0, 0, 0, more}
end

-- Remembers a row without an event of its own; returns the record. Where there is no offer, what names an
-- event is told by that, and money that nobody was there for is told so each time.
local function keep_refusal(call, offer, name, field, row, digest)
  if not offer and row[2] > 0 then return nil end
  if row[1] == CODE.conflict then return nil end
  if not offer and row[10] then return count_refusal(call, row[1], name) end
  if row[8] == 1 then
    return remember(call, field, pack_again(row[1], row[2], row[3], row[5], digest, name))
  end
  if row[1] > CODE.conflict then return refuse(call, row[1], field, name, digest) end
end

-- `act(call, offer, id, digest, body, campaign)` changes the offer and adds its events. It returns the row of
-- the answer, and true when the command has an event of its own. `act_on_none(call, name, id, digest, body,
-- campaign)` does so where there is no offer.
local function carry_out(act, act_on_none)
  local call, refused = begin_call()
  if not call then return cmsgpack.pack(refused) end
  local batch = cmsgpack.unpack(ARGV[6])
  spend(COST.argument_byte * #ARGV[6])
  local names, campaign_of, ids, offer_of, digests, bodies = batch[1], batch[2], batch[4], batch[5], batch[6],
    batch[7]
  local offers, campaigns = load_offers(names, campaign_of, batch[3])
  -- What this call has made of a command id counts for the commands behind it.
  local refusals, rows = {}, {}
  for i = 1, #ids do
    if i > 1 and is_spent() then break end
    spend(COST.command)
    local id, digest, o = ids[i], digests[i], offer_of[i]
    local offer, campaign = offers[o], campaigns[campaign_of[o]]
    local field = refusal_field(campaign.name, id)
    local record = campaign.answers[id] or answer_that_counts(call, campaign,
      redis.call('HGET', campaign.answers_key, id))
    local refusal = refusals[field] or refusal_that_counts(call, campaign, field,
      redis.call('HGET', KEYS[3], field))
    local sent = {digest = digest, offer = names[o], whole = bodies[i].whole}
    local row, own = repeated_row(record, refusal, sent, call.now, campaign.name, offer and offer.parts)
    local again = row ~= nil
    if not row and not offer then
      row = act_on_none and act_on_none(call, names[o], id, digest, bodies[i], campaign)
        or refused_row(call, CODE.no_such_offer)
    elseif not row then
      row, own = act(call, offer, id, digest, bodies[i], campaign)
    end
    if own then
      record = pack_row(names[o], row, digest, sent.whole)
      keep_answer(campaign, id, record)
    elseif not again then
      refusals[field] = keep_refusal(call, offer, names[o], field, row, digest)
    end
    rows[i] = row
  end
  return finish(call, offers, campaigns, rows)
end

-- How to carry out a command about a grab: `body.grab` names it. A hold whose time is over is ended first.
local function carry_out_for_grab(act, act_on_none)
  return carry_out(function(call, offer, id, digest, body, campaign)
    local grab = grab_of(offer, body.grab)
    if grab then lapse(call, offer, body.grab, grab) end
    return act(call, offer, grab, id, digest, body, campaign)
  end, act_on_none)
end

-- How to carry out a command about the offer itself: a closed one is steered no more.
local function carry_out_for_offer(act)
  return carry_out(function(call, offer, id, digest, body)
    if offer.closed then return refused_row(call, CODE.over) end
    return act(call, offer, id, digest, body)
  end)
end

local function operator_text(body)
  return body.operator and ',"operator":"' .. body.operator .. '"' or ''
end
