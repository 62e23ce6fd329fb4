-- For scripts that change a record: it is taken apart, and put together again.
local USUAL, UNUSUAL = 32, 64
local USUAL_SIZE = 36
local NOTHING = '\0\0\0\0'

local function taken_apart(record)
  local form = string.byte(record, 17)
  local parts = {
    token = string.sub(record, 1, 16),
    state = form % 8,
    omitted = bit.band(form, 8),
    print = bit.band(form, USUAL + UNUSUAL),
    began = string.sub(record, 18, 23),
    lease = form % 8 == RUNNING and string.sub(record, 24, 29) or '',
  }
  local at
  parts.attempt, parts.revision, parts.bypasses, at = counts(record)
  local size = 0
  if parts.print == USUAL then
    size = USUAL_SIZE
  elseif parts.print == UNUSUAL then
    size = 4 + struct.unpack('>I4', record, at)
  end
  parts.fingerprint = string.sub(record, at, at + size - 1)
  parts.contents = string.sub(record, at + size)
  return parts
end

local function put_together(parts)
  local form = parts.state + parts.omitted + parts.print
  local numbers
  if parts.attempt > 15 or parts.revision > 15 or parts.bypasses > 0 then
    form = form + WIDE
    numbers = struct.pack('>I4I4I4', parts.attempt, parts.revision, parts.bypasses)
  else
    numbers = string.char(parts.attempt * 16 + parts.revision)
  end
  return parts.token .. string.char(form) .. parts.began .. parts.lease .. numbers .. parts.fingerprint .. parts.contents
end

-- Contents are the notes, the result, and the remark to the end. The first two have their length and one before them,
-- or a zero in the place of nothing.
local function field_end(contents, at)
  return at + 3 + math.max(struct.unpack('>I4', contents, at) - 1, 0)
end

local function notes_result_and_remark(contents)
  if contents == '' then
    return NOTHING, NOTHING, ''
  end
  local notes_end = field_end(contents, 1)
  local result_end = field_end(contents, notes_end + 1)
  return string.sub(contents, 1, notes_end),
    string.sub(contents, notes_end + 1, result_end),
    string.sub(contents, result_end + 1)
end

local function contents_of(notes, result, remark)
  local contents = notes .. result .. remark
  return contents ~= NOTHING .. NOTHING and contents or ''
end
